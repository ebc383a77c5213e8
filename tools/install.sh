#!/usr/bin/env bash
# Installs megatron-dapo and the exact versions we test into a virtual environment. Dockerfile and
# apptainer.def run this script.
#
#   tools/install.sh cpu      [VENV]     # the tests and the quickstart; no GPU
#   tools/install.sh cuda13   [VENV]     # training with Transformer Engine, SGLang servers; Python 3.12, CUDA 13
#
# VENV: default .venv-cpu or .venv-cuda13. pip's own variables choose the index, e.g. PIP_INDEX_URL, PIP_EXTRA_INDEX_URL.
set -euo pipefail
lock="${1:-}"
root="$(cd "$(dirname "$0")/.." && pwd)"
constraints="$root/megatron_dapo/locks/$lock.txt"
if [ -z "$lock" ] || [ ! -f "$constraints" ]; then
  echo "install.sh: expected cpu or cuda13, found '${lock}'" >&2
  exit 2
fi
venv="${2:-$root/.venv-$lock}"
least=11
[ "$lock" = cpu ] || least=12

# A bare container image has no Python yet.
if ! command -v python3 >/dev/null && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv python3-dev build-essential git
fi
if ! python3 -c "import sys; sys.exit(sys.version_info < (3, $least))"; then
  echo "install.sh: expected Python 3.$least or newer as python3, found $(python3 --version)" >&2
  exit 2
fi
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$constraints" "$@"; }

# The wheel is built outside of the checkout, which may be read-only and stays clean.
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
printf '[build]\nbuild_base=%s/build\n' "$work" > "$work/setup.cfg"
export DIST_EXTRA_CONFIG="$work/setup.cfg"

# torch first: the extensions of Transformer Engine are built against it.
install "$(grep '^torch==' "$constraints")" "setuptools>=77" wheel
if [ "$lock" = cuda13 ]; then
  # One cuDNN only, the one that torch brings along: with two of them Transformer Engine silently uses a slow attention.
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  export CUDNN_PATH="$site/nvidia/cudnn" NVTE_FRAMEWORK=pytorch
  install ninja packaging pybind11
  install --no-build-isolation "transformer-engine[pytorch]"
  # SGLang 0.5.17 pins nvidia-cutlass-dsl 4.6.0, which fits only an older nvidia-cudnn-frontend than Transformer Engine asks
  # for: pip reports this conflict here and goes on.
  install --no-build-isolation "${root}[sglang]"
else
  install --no-build-isolation "$root"
fi
"$venv/bin/megatron-dapo" doctor --only python,packages,lock,apex
