#!/usr/bin/env bash
# image.sh DIR     builds deploy/docker/Dockerfile twice by buildah and runs the result, as root on Debian; for .ci/run long.
#   The bases are stand-ins under the names of the Dockerfile, made by debootstrap (kept in DIR) and the Go of this machine, with
#   the modules that go.mod names; so nothing is pulled. What is shown: both builds, from two folders, give the same bytes; the
#   program runs as uid 65532 without capabilities on a read-only root of glibc alone, answers a request there, and drains.
set -euo pipefail
DIR=${1:?usage: image.sh DIR}
HERE=$(cd "$(dirname "$0")" && pwd); ROOT=$(cd "$HERE/../../.." && pwd)
mkdir -p "$DIR"; DIR=$(cd "$DIR" && pwd)
work=$(mktemp -d "$DIR/run-XXXXXX"); started=()
b() { buildah --storage-driver vfs --root "$work/storage" --runroot "$work/runroot" "$@"; }
cleanup() {
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
  b umount --all >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap cleanup EXIT
say() { printf '%-34s %s\n' "$1" "$2"; }

dockerfile=$ROOT/deploy/docker/Dockerfile
version=$(sed -n 's/^ARG GO_VERSION=//p' "$dockerfile")
build_base=$(sed -n "s/^FROM \(.*\) AS build/\1/p" "$dockerfile" | sed "s/\${GO_VERSION}/$version/")
run_base=$(sed -n 's/^FROM \([^ ]*\)$/\1/p' "$dockerfile")

# --- bases ------------------------------------------------------------------------------------------------------------------

if [ ! -f "$DIR/debian/.done" ]; then
  rm -rf "$DIR/debian"
  mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' | sed -n 's/^bookworm //p' | head -n 1)
  debootstrap --variant=minbase --include=gcc,libc6-dev,ca-certificates bookworm "$DIR/debian" "$mirror" >"$DIR/debootstrap.log" 2>&1 ||
    { tail "$DIR/debootstrap.log"; exit 1; }
  touch "$DIR/debian/.done"
fi
# The image's Go is the Dockerfile's minor version or a later one, here that of this machine.
(cd "$ROOT" && GOFLAGS=-modcacherw GOMODCACHE=$work/mod GOPROXY="file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)" go mod download)
ctr=$(b from scratch)
b add -q "$ctr" "$DIR/debian" / >/dev/null
b add -q "$ctr" "$(go env GOROOT)" /usr/local/go >/dev/null
b add -q "$ctr" "$work/mod/cache/download" /proxy >/dev/null
b config --env PATH=/usr/local/go/bin:/usr/bin:/bin --env GOPATH=/go --env GOTOOLCHAIN=local --env GOPROXY=file:///proxy --env GOSUMDB=off --workingdir /go "$ctr"
b commit -q "$ctr" "docker.io/library/$build_base" >/dev/null
b rm "$ctr" >/dev/null; rm -rf "$work/mod"
mkdir "$work/glibc" # like distroless/base: glibc, certificates, a user, no shell
tar -C "$DIR/debian" -cf - --no-recursion ./usr ./usr/lib ./usr/lib64 ./lib ./lib64 \
  $(cd "$DIR/debian" && cat var/lib/dpkg/info/libc6:*.list var/lib/dpkg/info/libc6.list 2>/dev/null |
    sed -E 's#^/(lib|lib64)/#/usr/\1/#' | grep -E '^/usr/lib(64)?/' | sort -u | sed 's|^|.|' | while read -r f; do [ -e "$f" ] && echo "$f"; done) | tar -C "$work/glibc" -xf -
mkdir -p "$work/glibc"/{etc,proc,dev,tmp}
cp -a "$DIR/debian/etc/ssl" "$work/glibc/etc/"
echo 'nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin' > "$work/glibc/etc/passwd"
ctr=$(b from scratch); b add -q "$ctr" "$work/glibc" / >/dev/null; b config --user 65532 "$ctr"
b commit -q "$ctr" "$run_base" >/dev/null; b rm "$ctr" >/dev/null

# --- two builds -------------------------------------------------------------------------------------------------------------

mkdir "$work/other"; (cd "$ROOT" && git ls-files -co --exclude-standard -z | tar --null -T - -cf -) | tar -C "$work/other" -xf -
n=0
for from in "$ROOT" "$work/other"; do
  n=$((n + 1)); start=$SECONDS
  (cd "$from" && b bud -q --isolation chroot --pull-never --no-cache --timestamp 0 --build-arg VERSION=v0.0.0-test \
    -f deploy/docker/Dockerfile -t "localhost/grapevine:$n" . >"$work/bud$n.log" 2>&1) || { tail -n 30 "$work/bud$n.log"; exit 1; }
  ctr=$(b from --pull-never "localhost/grapevine:$n"); eval "root$n=$(b mount "$ctr")"; eval "ctr$n=$ctr"
  say "build $n" "$((SECONDS - start)) s, $(b inspect --type image --format '{{.FromImageID}}' "localhost/grapevine:$n" | cut -c1-16)"
done
program=usr/local/bin/grapevine
cmp "$root1/$program" "$root2/$program" || { echo "two builds differ"; exit 1; }
say "the same bytes" "$(sha256sum "$root1/$program" | cut -c1-16)…, $(stat -c %s "$root1/$program") bytes"
[ "$(b inspect --type image --format '{{.FromImageID}}' localhost/grapevine:1)" = "$(b inspect --type image --format '{{.FromImageID}}' localhost/grapevine:2)" ] ||
  { echo "two images differ"; exit 1; }
said=$(b inspect --type image --format '{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}' localhost/grapevine:1)
[ "$said" = "65532:65532 [/usr/local/bin/grapevine] [agent]" ] || { echo "configuration: $said"; exit 1; }
say "user, entry point, command" "$said"
said=$(b run --isolation chroot "$ctr1" -- /usr/local/bin/grapevine version)
grep -q v0.0.0-test <<< "$said" || { echo "version: $said"; exit 1; }
say "buildah run … version" "$(head -n 1 <<< "$said")"

# --- as uid 65532 on a read-only root ---------------------------------------------------------------------------------------

base=${IMAGE_PORT_BASE:-19600}; status=$((base + 2))
(cd "$ROOT" && go build -o "$work/fakeengine" ./test/fakeengine)
"$work/fakeengine" -listen "127.0.0.1:$((base + 9))" -model sim -journal "$work/journal" >"$work/engine.log" 2>&1 & started+=($!)
cat > "$work/inside.sh" <<'IN'
set -eu
mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"
if touch "$1/tmp/x" 2>/dev/null; then echo "the root can be written to"; exit 1; fi
mount -t proc -o ro proc "$1/proc"
exec setpriv --no-new-privs --bounding-set=-all,+setuid,+setgid,+sys_chroot --inh-caps=-all chroot --userspec=65532:65532 "$1" /usr/local/bin/grapevine agent
IN
env -i PATH="$PATH" GRAPEVINE_PORT_BASE="$base" GRAPEVINE_LISTEN="127.0.0.1:$base" GRAPEVINE_PEER_LISTEN="127.0.0.1:$((base + 1))" GRAPEVINE_STATUS_LISTEN="127.0.0.1:$status" \
  GRAPEVINE_GOSSIP_LISTEN="127.0.0.1:$((base + 3))" GRAPEVINE_ENGINE_URL="http://127.0.0.1:$((base + 9))" GRAPEVINE_NODE_NAME=image \
  unshare -m bash "$work/inside.sh" "$root1" >"$work/agent.log" 2>&1 & agent=$!; started+=("$agent")
for _ in $(seq 100); do curl -sf "http://127.0.0.1:$status/readyz" >/dev/null && break; sleep 0.2; done
curl -sf "http://127.0.0.1:$status/readyz" >/dev/null || { echo "not ready:"; cat "$work/agent.log"; exit 1; }
grep -q '^Uid:.65532.65532.65532.65532' "/proc/$agent/status" && grep -q '^CapEff:.0000000000000000' "/proc/$agent/status" && grep -q '^NoNewPrivs:.1' "/proc/$agent/status" ||
  { grep -E '^(Uid|Cap|NoNew)' "/proc/$agent/status"; exit 1; }
say "ready on a read-only root" "uid 65532, no capabilities, no new privileges"
answer=$(curl -sf "http://127.0.0.1:$base/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hello"}]}')
grep -q '"finish_reason"' <<< "$answer" || { echo "answer: $answer"; exit 1; }
say "a chat" "answered, $(wc -c <<< "$answer") bytes"
kill -TERM "$agent"; rc=0; wait "$agent" || rc=$?
[ $rc -eq 0 ] || { echo "SIGTERM: exit $rc"; cat "$work/agent.log"; exit 1; }
say "SIGTERM" "drained, exit 0"
