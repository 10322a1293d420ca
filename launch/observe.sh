#!/usr/bin/env bash
# Purpose: watch it work: Prometheus beside launch/demo.sh, whose load goes on; prints where to look.
#   launch/observe.sh [options of `python -m eval demo`; default: --requests 2000]
# Machine: as launch/demo.sh, and Prometheus (Debian: apt-get install prometheus).
# Minutes: until the load ends, or Ctrl-C.
#
# Environment: as launch/demo.sh, and
#   PROMETHEUS_PORT  port of Prometheus (default: 9090)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v prometheus >/dev/null; then
    echo "observe: no Prometheus here: apt-get install prometheus, or https://prometheus.io/download" >&2
    exit 2
fi
export PORT=${PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
at=127.0.0.1:${PROMETHEUS_PORT:-9090}
scratch=$(mktemp -d "${TMPDIR:-/tmp}/chunkcache-observe.XXXXXX")
cp launch/observe/rules.yml "$scratch"
sed "s/127.0.0.1:30000/127.0.0.1:$PORT/" launch/observe/prometheus.yml >"$scratch/prometheus.yml"
prometheus --config.file "$scratch/prometheus.yml" --storage.tsdb.path "$scratch/data" --web.listen-address "$at" \
    >"$scratch/prometheus.log" 2>&1 &
prometheus=$!
trap 'kill "$prometheus" 2>/dev/null || true; wait "$prometheus" 2>/dev/null || true; rm -rf "$scratch"' EXIT
echo "observe: Prometheus at http://$at/graph, alerts at http://$at/alerts; metrics at http://127.0.0.1:$PORT/metrics" >&2
echo "observe: for Grafana, import launch/observe/dashboard.json" >&2
if (($# == 0)); then set -- --requests 2000; fi
DEMO_FLAGS="--enable-metrics ${DEMO_FLAGS:-}" bash launch/demo.sh "$@"
