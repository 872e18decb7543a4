#!/usr/bin/env bash
# Prometheus and Grafana with the dashboard, where they are installed; says plainly where one is not. Ctrl-C ends both.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
data=${1:-$here/data}
mkdir -p "$data"
started=()
trap 'for one in "${started[@]}"; do kill "$one" 2>/dev/null || true; done; wait' EXIT

if command -v prometheus >/dev/null; then
  prometheus --config.file="$here/prometheus.yml" --storage.tsdb.path="$data/prometheus" \
    --web.listen-address=127.0.0.1:9090 >"$data/prometheus.log" 2>&1 &
  started+=($!)
  echo "Prometheus: http://127.0.0.1:9090 (log: $data/prometheus.log)"
else
  echo "Prometheus is not installed; on Debian and Ubuntu: apt-get install prometheus" >&2
fi

grafana=$(command -v grafana-server || command -v grafana || true)
if [ -n "$grafana" ]; then
  home=${GRAFANA_HOME:-/usr/share/grafana}
  mkdir -p "$data/provisioning/datasources" "$data/provisioning/dashboards" "$data/dashboards"
  cp "$here/grafana/datasource.yml" "$data/provisioning/datasources/"
  cp "$here/grafana/dashboards.yml" "$data/provisioning/dashboards/"
  cp "$here/dashboard.json" "$data/dashboards/"
  arguments=(--homepath "$home")
  [ "$(basename "$grafana")" = grafana ] && arguments=(server "${arguments[@]}")
  TIERCACHE_DASHBOARDS="$data/dashboards" GF_PATHS_DATA="$data/grafana" GF_PATHS_PROVISIONING="$data/provisioning" \
    GF_SERVER_HTTP_ADDR=127.0.0.1 "$grafana" "${arguments[@]}" >"$data/grafana.log" 2>&1 &
  started+=($!)
  echo "Grafana: http://127.0.0.1:3000/d/tiercache (log: $data/grafana.log)"
else
  echo "Grafana is not installed (Debian has no package of it: https://grafana.com/docs/grafana/latest/setup-grafana/);" >&2
  echo "a Grafana elsewhere takes $here/dashboard.json by Dashboards > Import" >&2
fi

[ ${#started[@]} -gt 0 ] || exit 1
wait -n
