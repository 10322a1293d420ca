"""Start SGLang's server with the chunk cache.

    python -m sglang_chunkcache.launch_server --model-path M [our flags] [any SGLang flag]

`--model-path bundled` serves the small model in this package. `--stock` starts SGLang without the
chunk cache, for comparison; only the CPU platform is ours then. On a machine without a GPU the
flags that SGLang's CPU path needs are added unless they are given.

Below are our flags. SGLang's are taken, too: `python -m sglang.launch_server --help` lists them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

from retrieval.command_line import OUR_PREFIX, Parser, meant, program
from retrieval.model_path import find_model
from sglang_chunkcache import __version__, config, quiet, tree_choice
from sglang_chunkcache.compilers import add_own_tools, missing_compilers
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops
from sglang_chunkcache.installation import server_installation
from sglang_chunkcache.own_selectors import check_selectors
from sglang_chunkcache.plugin import BACKEND
from sglang_chunkcache.start_steps import shown_steps, step

if __name__ != "__main__":
    # SGLang's processes import this module again before anything of SGLang
    define_torchvision_ops()
if __name__ == "__mp_main__":
    quiet.hide(config.from_env())
    if config.from_env() is not None:
        # Sent to the whole group, it would end what the main process needs to answer the last
        # requests (front/drain.py).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

CPU_FLAGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
    "--sleep-on-idle": None,
    "--mem-fraction-static": "0.5",
    "--max-total-tokens": "65536",
}
"""The flags that SGLang's CPU path needs without `sgl_kernel`.
The pool is small because it is in the machine's main memory. The fraction leaves room for what
other programs take while the model loads: SGLang counts that as weights."""

MODEL_FLAGS = ("--model-path", "--model", "--tokenizer-path")
"""SGLang's flags that take a model's name."""


def main(argv: list[str]) -> None:
    """Parse, check, start; returns when the server stops.
    A mistake in the flags exits with code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog=program("python -m sglang_chunkcache.launch_server"),
        usage="%(prog)s --model-path M [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--stock", action="store_true", help="SGLang without the chunk cache, for comparison"
    )
    config.add_flags(parser)
    args, rest = parser.parse_known_args(argv)
    if unknown := [flag for flag in rest if flag.startswith(OUR_PREFIX)]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown, _our_flags())}")
    opened = dict[str, Any]()
    with ExitStack() as shown:
        if not args.stock:
            shown.enter_context(shown_steps())
        step("importing torch")
        try:
            with server_installation():
                define_torchvision_ops()
            settings = config.from_flags(args)
            rest = server_flags(found_models(rest))
            add_own_tools()
            if not args.stock:
                _check_attention(settings)
                _check_storage(settings)
                check_selectors(settings)
        except ValueError as error:
            parser.error(str(error))
        if args.stock:
            # Inherited from a server of ours, it would turn the hooks on in a stock one.
            os.environ.pop(config.ENV_VAR, None)
        else:
            if "--log-level" in _names(rest):
                settings = dataclasses.replace(settings, log="all")
            os.environ.update(settings.to_env())
            quiet.hide(settings)
            for name in ("encoder", "reranker"):
                if vars(settings)[name] is not None and settings.index is None:
                    parser.error(f"--{name} needs --index")
            # Before SGLang and the model are loaded, so that a bad index is reported at once. Only
            # this process loads the index.
            if settings.index is not None:
                from retrieval.errors import RetrievalError
                from sglang_chunkcache.front.startup import open_reranker, open_retriever

                opens = {"index": open_retriever, "reranker": open_reranker}
                for name, load in opens.items():
                    if vars(settings)[name] is None:
                        continue
                    step(f"opening the {name}")
                    try:
                        opened[name] = load(settings)
                    except (RetrievalError, OSError) as error:
                        parser.error(f"--{name}: {error}")
        _run(
            rest,
            stock=args.stock,
            retriever=opened.get("index"),
            reranker=opened.get("reranker"),
            shown=shown,
            fail=parser.error,
        )


def prepare(flags: list[str], *, stock: bool, fail: Callable[[str], NoReturn]) -> Any:
    """SGLang's ServerArgs of `server_flags`, plugins loaded and the tree chosen.
    `fail` is called with the names of unsupported settings."""
    step("importing SGLang")
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    load_plugins()
    # SGLang's own error comes below 400 lines of usage.
    parser = Parser(more_flags=_our_flags(), fail=fail)
    ServerArgs.add_cli_args(parser)
    if "--config" not in _names(flags):  # its file has further flags
        parser.parse_args(flags)
    server_args = prepare_server_args(flags)
    if not stock:
        from sglang_chunkcache.kv_events import flags_for

        # ours by name, so that a scheduler without it does not start
        is_ours = _choose_tree(server_args, fail)
        try:
            more = ["--radix-cache-backend", BACKEND] if is_ours else flags_for(server_args)
        except ValueError as error:
            fail(f"--kv-events-config: {' '.join(str(error).split())}")
        server_args = prepare_server_args([*flags, *more])
    if (server_args.device or "cuda") == "cpu":
        _bind_cpu_ranks(server_args.dp_size * server_args.tp_size * server_args.pp_size)
    return server_args


def found_models(rest: list[str]) -> list[str]:
    """The user's flags with each model's name as `find_model` returns it, before SGLang is
    imported.

    Raises:
        ValueError: no model, or one that is neither here nor on the hub.
    """
    flags = list[str]()
    for flag in rest:
        name, equals, value = flag.partition("=")
        # `--model=NAME` in two words, so that the name is found at one place.
        flags += [name, value] if equals and name in MODEL_FLAGS else [flag]
    for index in range(1, len(flags)):
        if flags[index - 1] in MODEL_FLAGS:
            flags[index] = find_model(flags[index], file="config.json")
    # The file of SGLang's --config may name the model.
    if not {"--model-path", "--model", "--config"} & _names(flags):
        named = "a model's folder, its name on the Hugging Face hub, or bundled"
        misspelt = meant([*_names(flags)], MODEL_FLAGS)
        raise ValueError(f"--model-path is missing: {named}{misspelt}")
    return flags


def server_flags(rest: list[str]) -> list[str]:
    """SGLang's flags: the user's, and what the CPU path needs."""
    import torch

    if torch.cuda.is_available():
        return [*rest]
    needed = {flag: value for flag, value in CPU_FLAGS.items() if flag not in _names(rest)}
    return [*rest, *(each for pair in needed.items() for each in pair if each is not None)]


def _our_flags() -> list[str]:
    names = [config.flag_name(f.name) for f in config.flag_fields()]
    return [*names, *config.SHORT_FLAGS.values()]


def _names(flags: list[str]) -> set[str]:
    """Of the flags among the words of a command line."""
    return {flag.partition("=")[0] for flag in flags if flag.startswith("--")}


def _choose_tree(server_args: Any, fail: Callable[[str], NoReturn]) -> bool:
    """Whether the tree is ours. Puts the choice where all processes find it, and says it if it is
    none of the user's."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig

    if refused := tree_choice.refusals(server_args):
        fail(f"not supported together with the chunk cache: {', '.join(refused)}")
    # SGLang sets page sizes by attention backend and model
    server_args.resolve_once()
    asked = config.from_env()
    assert asked is not None
    found = tree_choice.stock_only(
        resolving_view(server_args), ModelConfig.from_server_args(server_args), asked
    )
    try:
        settings = tree_choice.decided(asked, found)
    except ValueError as error:
        fail(str(error))
    if settings.is_stock and not asked.is_stock:
        _say(f"chunk cache: found {', '.join(found)}: the tree is SGLang's, and no KV is moved")
    if settings.order != asked.order:
        flag = config.flag_name("order")
        _say(f"chunk cache: {flag} {settings.order}: both servers must make the same prompt")
    os.environ.update(settings.to_env())
    return not settings.is_stock


def _check_attention(settings: config.ChunkCacheConfig) -> None:
    """Checks that need no model. `attention.choice.create` does the others, and takes the mask
    where no kernel compiles: what a cache of compiled ones has needs no nvcc, so that is only
    said."""
    import torch

    has_cuda = torch.cuda.is_available()
    if settings.recompute_attention == "sparse":
        if settings.reuse != "fused":
            raise ValueError(
                "--recompute-attention sparse needs --reuse fused: without it nothing is recomputed"
            )
        if not has_cuda:
            raise ValueError("--recompute-attention sparse: there is no CUDA device; use auto")
    is_compiled = settings.reuse == "fused" and settings.recompute_attention != "masked"
    if has_cuda and is_compiled and (missing := missing_compilers()):
        _say(
            f"chunk cache: not found: {', '.join(missing)}. --reuse fused compiles its attention"
            " when the server starts; else the mask attends, which is slower, and"
            " --recompute-attention sparse is refused. The README says what CUDA needs."
        )


def _check_storage(settings: config.ChunkCacheConfig) -> None:
    """Checks that need no folder: each rank opens its own."""
    flag, name = config.flag_name("storage_backend"), settings.storage_backend
    if name is None:
        if settings.storage_backend_extra_config is not None or settings.storage_mib:
            lonely = "the storage's other flags mean nothing without it"
            raise ValueError(f"{flag} is missing: {lonely}")
        return
    if name not in config.STORAGE_BACKENDS:
        supported = " and ".join(config.STORAGE_BACKENDS)
        raise ValueError(
            f"{flag} {name} is not supported, only {supported}: HiCache's others do not keep one"
            " tensor by its key"
        )
    if settings.reuse == "exact" and settings.host_mib == 0:
        raise ValueError(
            f"{flag} needs {config.flag_name('host_mib')}: exact chains are loaded into host memory"
        )
    if name == "dynamic" and not settings.storage_mib:
        raise ValueError(
            f"{flag} dynamic needs {config.flag_name('storage_mib')}: nobody can tell what it has"
            " room for"
        )
    from sglang_chunkcache.storage.backend import extra_config
    from sglang_chunkcache.storage.key import secret_of

    # Their errors come here in a moment, in a rank only when the model is loaded.
    extra_config(settings)
    secret_of(os.environ)


def _run(
    flags: list[str],
    *,
    stock: bool,
    retriever: Any,
    reranker: Any,
    shown: ExitStack,
    fail: Callable[[str], NoReturn],
) -> None:
    """`shown` is closed once the server is ready."""
    server_args = prepare(flags, stock=stock, fail=fail)
    if server_args.node_rank == 0:
        _check_port(server_args.host, server_args.port, fail)
    if not stock:
        _check_hooks(fail)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    try:
        if stock:
            launch_server(server_args)
        else:
            from sglang_chunkcache.front.app import installed
            from sglang_chunkcache.front.startup import check_ranks, warm_up

            front, settings = installed(), config.from_env()
            assert settings is not None
            front.config = settings  # its tree was not decided yet
            front.retriever, front.reranker = retriever, reranker
            model, device = server_args.model_path, server_args.device
            _say(f"chunk cache {__version__}: loading {model} on {device}")
            signal.signal(signal.SIGTERM, _end)  # until front/drain.py listens
            step("starting SGLang's processes")

            def started() -> None:
                check_ranks(server_args, front)
                shown.close()

            launch_server(server_args, execute_warmup_func=warm_up, launch_callback=started)
    finally:
        # As SGLang's launcher: after a failed start children would hold the device's memory.
        kill_process_tree(os.getpid(), include_parent=False)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end(*_: object) -> NoReturn:
    """By way of `finally`: what has started already ignores the signal."""
    sys.exit(128 + signal.SIGTERM)


def _check_port(host: str, port: int, fail: Callable[[str], NoReturn]) -> None:
    """SGLang finds out once the model is loaded, and what it asks then another server answers."""
    try:
        (family, kind, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        fail(f"--host {host} --port {port}: {error.strerror}")


def _check_hooks(fail: Callable[[str], NoReturn]) -> None:
    from sglang_chunkcache.hooks import missing_hooks

    settings = config.from_env()
    assert settings is not None
    if missing := missing_hooks(settings, is_main=True):
        fail(f"SGLang did not apply our hooks {missing}; the log above has the cause")


def _bind_cpu_ranks(num_ranks: int) -> None:
    """Give every rank cores of its own: on one NUMA node SGLang fails at the start without it."""
    # Not cpu_count: a container may have fewer cores than the machine.
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
        share = max(1, len(cores) // num_ranks)
        # Ranks beyond the cores share some: SGLang refuses fewer entries than ranks.
        groups = [cores[i * share % len(cores) :][:share] for i in range(num_ranks)]
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, group)) for group in groups
        )


if __name__ == "__main__":
    main(sys.argv[1:])
