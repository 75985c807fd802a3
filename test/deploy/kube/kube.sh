#!/usr/bin/env bash
# kube.sh DIR build|start|stop|verify     what a real Kubernetes API server says to charts and component; for .ci/run long.
#   build:  kube-apiserver 1.34.4, kubectl, helm and kustomize from their Go modules into DIR/bin, etcd from Debian: minutes, once
#   start:  etcd and kube-apiserver on 127.0.0.1; no kubelet, no controllers: Pods are never made
#   verify: every mode by server-side dry run with strict validation, three broken manifests that must be refused, no warning of
#           the restricted PodSecurity level about our container, and helm install, upgrade, uninstall for real
#   stop:   ends both by their ids
set -euo pipefail
DIR=${1:?usage: kube.sh DIR build|start|stop|verify}; CMD=${2:?usage: kube.sh DIR build|start|stop|verify}
HERE=$(cd "$(dirname "$0")" && pwd); ROOT=$(cd "$HERE/../../.." && pwd)
mkdir -p "$DIR/bin" "$DIR/run"; DIR=$(cd "$DIR" && pwd)
PORT=${KUBE_PORT:-16443}; ETCD_PORT=${ETCD_PORT:-12379}
export PATH=$DIR/bin:$PATH KUBECONFIG=$DIR/run/kubeconfig

build() {
  command -v etcd >/dev/null || { apt-get update -qq && apt-get install -y -qq etcd-server >/dev/null; }
  [ -x "$DIR/bin/helm" ] || GOBIN=$DIR/bin go install helm.sh/helm/v3/cmd/helm@v3.22.0
  [ -x "$DIR/bin/kustomize" ] || GOBIN=$DIR/bin go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.1
  [ -x "$DIR/bin/kube-apiserver" ] && [ -x "$DIR/bin/kubectl" ] && return
  local v=k8s.io/component-base/version src; src=$(mktemp -d)
  cp "$HERE/go.mod.txt" "$src/go.mod"; cp "$HERE/go.sum.txt" "$src/go.sum"
  local ld="-s -w -X $v.gitVersion=v1.34.4 -X $v.gitMajor=1 -X $v.gitMinor=34"
  (cd "$src" && for c in kube-apiserver kubectl; do go build -mod=mod -ldflags "$ld" -o "$DIR/bin/$c" "k8s.io/kubernetes/cmd/$c"; done)
  rm -rf "$src"
}

start() {
  local r=$DIR/run tok; stop; rm -rf "$r"; mkdir -p "$r/certs"; cd "$r"
  openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
  tok=$(openssl rand -hex 16); echo "$tok,admin,admin,system:masters" > tok.csv
  setsid etcd --data-dir "$r/etcd" --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT" \
    --listen-peer-urls "http://127.0.0.1:$((ETCD_PORT+1))" >etcd.log 2>&1 </dev/null & echo $! > etcd.pid
  setsid kube-apiserver --etcd-servers="http://127.0.0.1:$ETCD_PORT" --service-cluster-ip-range=10.0.0.0/24 \
    --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key --service-account-issuer=https://k.local \
    --authorization-mode=RBAC --token-auth-file=tok.csv --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$PORT" \
    --cert-dir=certs --disable-admission-plugins=ServiceAccount --endpoint-reconciler-type=none >api.log 2>&1 </dev/null & echo $! > api.pid
  cat > kubeconfig <<K
apiVersion: v1
kind: Config
clusters: [{name: local, cluster: {server: "https://127.0.0.1:$PORT", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: $tok}}]
contexts: [{name: local, context: {cluster: local, user: admin}}]
current-context: local
K
  for _ in $(seq 120); do kubectl get --raw /readyz >/dev/null 2>&1 && return; sleep 0.5; done
  echo "kube-apiserver did not become ready, see $r/api.log" >&2; return 1
}

stop() {
  local p pid
  for p in api etcd; do
    [ -f "$DIR/run/$p.pid" ] || continue
    pid=$(cat "$DIR/run/$p.pid"); kill "$pid" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    rm -f "$DIR/run/$p.pid"
  done
}

verify() {
  local chart=$ROOT/deploy/helm/grapevine out=$DIR/run/out failed=0 mode qos gpu f
  rm -rf "$out"; mkdir -p "$out"
  kubectl create namespace gv --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  kubectl label namespace gv --overwrite pod-security.kubernetes.io/warn=restricted >/dev/null
  helm lint --strict "$chart" -f "$chart/ci/vllm-isolated-values.yaml" >/dev/null && echo "accepted  helm lint --strict" || failed=1
  for f in "$chart"/ci/*.yaml; do helm template llm "$chart" --kube-version 1.34.4 -n gv -f "$f" > "$out/helm $(basename "$f" .yaml).yaml"; done
  for mode in isolated open; do for qos in guaranteed burstable; do for gpu in none visible explicit dra podResources; do
    helm template llm "$chart" --kube-version 1.34.4 -n gv --set "mode=$mode,engine.image=e,engine.model=m,agent.qos=$qos,agent.gpu.mode=$gpu,agent.gpu.devices=0,agent.gpu.claim=one" \
      > "$out/helm $mode $qos $gpu.yaml"
  done; done; done
  kustomize build "$ROOT/deploy/kustomize/example" > "$out/kustomize example.yaml"
  for f in "$out"/*.yaml; do
    if kubectl apply -n gv --dry-run=server --validate=strict -f "$f" > "$out/said" 2>&1; then
      # Warnings name containers; ours may not be among them, but where it reads the kubelet's socket as root.
      if [[ $f != *[pP]od*esources* ]] && grep -q 'Warning.*"grapevine"' "$out/said"; then echo "WARNED    $(basename "$f" .yaml)"; grep Warning "$out/said"; failed=1
      else echo "accepted  $(basename "$f" .yaml): $(grep -c 'server dry run' "$out/said") objects"; fi
    else echo "REFUSED   $(basename "$f" .yaml)"; cat "$out/said"; failed=1; fi
  done
  # Three broken ones.
  local good="$out/helm vllm-isolated-values.yaml"
  sed 's/terminationGracePeriodSeconds:/terminationGraceSeconds:/' "$good" > "$out/broken unknown field.yaml"
  sed 's/restartPolicy: Always$/restartPolicy: Never/' "$good" > "$out/broken sidecar policy.yaml"
  sed 's/protocol: UDP/protocol: UPD/' "$good" > "$out/broken protocol.yaml"
  for f in "$out"/broken*.yaml; do
    if kubectl apply -n gv --dry-run=server --validate=strict -f "$f" > "$out/said" 2>&1; then echo "ACCEPTED  $(basename "$f" .yaml), and should not be"; failed=1
    else echo "refused   $(basename "$f" .yaml): $(grep -v Warning "$out/said" | grep -i -m1 -o 'strict decoding error.*\|Unsupported value.*\|Invalid value.*\|Forbidden.*' | cut -c1-110)"; fi
  done
  # For real; the key must outlive an upgrade.
  local set=(--set "engine.image=e,engine.model=m")
  if helm install llm "$chart" -n gv "${set[@]}" >/dev/null 2>"$out/said"; then
    local key; key=$(kubectl get secret -n gv -l app.kubernetes.io/instance=llm -o jsonpath='{.items[0].data.key}')
    helm upgrade llm "$chart" -n gv "${set[@]}" --set replicas=3 >/dev/null 2>"$out/said" || { cat "$out/said"; failed=1; }
    [ -n "$key" ] && [ "$key" = "$(kubectl get secret -n gv -l app.kubernetes.io/instance=llm -o jsonpath='{.items[0].data.key}')" ] || { echo "the key did not survive the upgrade"; failed=1; }
    [ "$(kubectl get deployment -n gv -o jsonpath='{.items[0].spec.replicas}')" = 3 ] || { echo "the upgrade changed nothing"; failed=1; }
    helm uninstall llm -n gv >/dev/null && [ -z "$(kubectl get deployment -n gv -o name)" ] && echo "accepted  helm install, upgrade (same key, 3 replicas), uninstall" || failed=1
  else echo "REFUSED   helm install"; cat "$out/said"; failed=1; fi
  # A chart of others, with the component as its post-renderer.
  local their=$out/their post=$out/post
  mkdir -p "$their/templates" "$post"; printf 'apiVersion: v2\nname: their\nversion: 1.0.0\n' > "$their/Chart.yaml"
  cp "$ROOT/deploy/kustomize/example/vllm.yaml" "$their/templates/"; cp -r "$ROOT/deploy/kustomize/component" "$post/"
  sed 's|vllm.yaml|all.yaml|; s|\.\./component|component|' "$ROOT/deploy/kustomize/example/kustomization.yaml" > "$post/kustomization.yaml"
  printf '#!/bin/sh\ncd "%s" && cat > all.yaml && exec kustomize build .\n' "$post" > "$out/render"; chmod +x "$out/render"
  if helm install their "$their" -n gv --post-renderer "$out/render" >/dev/null 2>"$out/said"; then
    [ "$(kubectl get deployment -n gv -o jsonpath='{.items[0].spec.template.spec.initContainers[0].name}')" = grapevine ] || { echo "the component added no agent"; failed=1; }
    helm uninstall their -n gv >/dev/null && echo "accepted  another chart with the component as post-renderer: install, the agent is there, uninstall"
  else echo "REFUSED   post-renderer"; cat "$out/said"; failed=1; fi
  return $failed
}
"$CMD"
