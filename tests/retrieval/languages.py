"""Short texts and questions in Chinese, Japanese, Thai, Korean and English,
written for these tests; each has one right text."""

# ruff: noqa: RUF001 (the marks of several scripts look alike)
from __future__ import annotations

from pathlib import Path

TEXTS = {
    "zh-returns.txt": (
        "退货规定：商品收到后三十天内可以退回，运费由商店承担。退款在五个工作日内到账。"
    ),
    "zh-hours.txt": "图书馆周一至周五早上九点开门，晚上八点关门，周末只开放半天。",
    "zh-tea.txt": "绿茶应当用八十度左右的热水冲泡，水太烫会使茶汤变苦。",
    "ja-train.txt": "終電は午前零時十五分に中央駅を出発します。切符は改札の横の券売機で買えます。",
    "ja-cat.txt": "うちの猫は魚よりも鶏肉が好きで、毎朝六時に朝ごはんをねだります。",
    "ja-warranty.txt": "この掃除機の保証期間は二年間です。修理には領収書が必要です。",
    "th-clinic.txt": "คลินิกเปิดทุกวันตั้งแต่แปดโมงเช้าถึงห้าโมงเย็น ผู้ป่วยควรนำบัตรประชาชนมาด้วย",
    "th-mango.txt": "ข้าวเหนียวมะม่วงต้องใช้กะทิสดและมะม่วงสุกที่หวานจัด",
    "ko-parking.txt": "지하 주차장은 두 시간까지 무료이며 그 뒤로는 십 분마다 오백 원을 냅니다.",
    "ko-kimchi.txt": "배추김치는 소금에 절인 배추에 고춧가루와 마늘을 넣어 담급니다.",
    "en-bridge.md": (
        "# The bridge\n\nThe old bridge over the river Tarn is closed to lorries until May."
    ),
    "en-owl.txt": "An owl lives in the barn and hunts mice at night.",
}

QUESTIONS = {
    "商品可以退回吗？运费谁承担？": "zh-returns.txt",
    "图书馆几点关门？": "zh-hours.txt",
    "泡绿茶用多少度的水？": "zh-tea.txt",
    "終電は何時に出発しますか？": "ja-train.txt",
    "掃除機の保証は何年ですか？": "ja-warranty.txt",
    "คลินิกเปิดกี่โมง": "th-clinic.txt",
    "주차장은 몇 시간 무료인가요?": "ko-parking.txt",
    "김치에 마늘을 넣나요?": "ko-kimchi.txt",
}


def write_texts(folder: Path) -> Path:
    """The texts as files."""
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return folder
