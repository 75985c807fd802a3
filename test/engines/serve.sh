#!/usr/bin/env bash
# serve.sh ENGINE HOST:PORT [ARGUMENT...]    runs an engine that install.sh installed, in the foreground, until it is killed
#
# ENGINE and the model that it serves, with start-up time and memory on 2 cores:
#   llamacpp   gemma   two slots of 2,048 tokens; 2 to 4 s, 0.45 GiB
#   vllm       tiny    V1, two sequences at once, 2,048 tokens; 60 to 240 s, 4.3 GiB in three processes
#   infinity   minilm  embeddings; 30 s, 1.2 GiB
#   dynamo     tiny    the frontend, and a mock worker that computes nothing; 2 to 14 s, 0.7 GiB. Uses PORT+1 too.
#
# More arguments go to the engine. Nothing here listens beyond HOST or loopback, or calls anybody.
set -euo pipefail
engine=${1:?which engine?} host=${2%:*} port=${2##*:}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
dir=$(bash "$here/install.sh" --dir "$engine")
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 INFINITY_ANONYMOUS_USAGE_STATS=0

case $engine in
llamacpp)
  exec nice -n 5 "$dir/llama-server" -m "$dir/gemma-3-270m-q4_k_m.gguf" --alias gemma --host "$host" --port "$port" \
    -c 4096 --parallel 2 --metrics --slots --props -t 1 "$@" ;;
vllm)
  # Another process's loopback is no cluster: the parts of vLLM talk to each other on it.
  export CUDA_VISIBLE_DEVICES= VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_HOST_IP=127.0.0.1
  exec nice -n 15 "$dir/venv/bin/vllm" serve "$dir/models/tiny5" --served-model-name tiny --host "$host" --port "$port" \
    --dtype bfloat16 --enforce-eager --max-model-len 2048 --max-num-seqs 2 "$@" ;;
infinity)
  exec nice -n 10 "$dir/venv/bin/infinity_emb" v2 --model-id "$dir/model" --served-model-name minilm --host "$host" --port "$port" \
    --engine torch --device cpu --no-bettertransformer --url-prefix /v1 "$@" ;;
dynamo)
  state=$(mktemp -d)
  export DYN_FILE_KV=$state DYN_TCP_RPC_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 DYN_SYSTEM_HOST=127.0.0.1
  planes=(--discovery-backend file --request-plane tcp --event-plane zmq)
  model=$(bash "$here/install.sh" --dir vllm)/models/tiny4
  DYN_SYSTEM_PORT=$((port + 1)) nice -n 10 "$dir/venv/bin/python" -m dynamo.mocker --model-path "$model" --model-name tiny "${planes[@]}" \
    --num-gpu-blocks-override 300 --block-size 16 --max-num-seqs 4 --max-model-len 2048 --speedup-ratio 0.5 &
  worker=$!
  trap 'kill $worker 2>/dev/null; rm -rf "$state"' EXIT
  nice -n 10 "$dir/venv/bin/python" -m dynamo.frontend --http-host "$host" --http-port "$port" "${planes[@]}" "$@" &
  frontend=$!
  trap 'kill $frontend 2>/dev/null' TERM INT
  wait $frontend ;;
*) echo "serve.sh: unknown engine $engine" >&2; exit 2 ;;
esac
