package gpu

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"
)

// KubeletSocket is where the kubelet tells which devices it gave to which container, if it is mounted.
const KubeletSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"

// PodDevices finds our cards by asking the kubelet for the NVIDIA devices of the containers of our pod.
//
// The one call of one small message does not warrant a gRPC library: it is HTTP/2 with a five-byte frame
// around protobuf, which is read here by hand (k8s.io/kubelet/pkg/apis/podresources/v1, stable since 1.28).
func PodDevices(socket, namespace, pod string) Finder {
	return Finder{Method: "the kubelet's pod resources", Find: func() ([]string, error) {
		if namespace == "" || pod == "" {
			return nil, errors.New("name space and name of the pod are not known")
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		message, err := listPods(ctx, socket)
		if err != nil {
			return nil, err
		}
		return podDevices(message, namespace, pod)
	}}
}

// SharedClaim finds our cards by a ResourceClaim that our container shares with another of the pod, the engine's:
// then the cards that we see are the engine's. It asks the kubelet, and wants the name of our own container, which
// the pod's manifest has to tell it.
func SharedClaim(socket, namespace, pod, container string) Finder {
	return Finder{Method: "a ResourceClaim shared with the engine's container", Find: func() ([]string, error) {
		if namespace == "" || pod == "" || container == "" {
			return nil, errors.New("name space, pod and container are not known")
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		message, err := listPods(ctx, socket)
		if err != nil {
			return nil, err
		}
		return sharedClaim(message, namespace, pod, container)
	}}
}

// sharedClaim counts the NVIDIA devices of our container's claims. Each claim must be another container's too.
// What it returns holds only if we see exactly that many cards.
func sharedClaim(message []byte, namespace, pod, container string) ([]string, error) {
	ours, others := map[string]int{}, map[string]bool{}
	// Field numbers: container 5 = dynamic resources; of these 2 = claim name, 4 = claim resources; of these
	// 2 = driver name.
	for p := range subfields(message, 1) {
		if first(p, 1) != pod || first(p, 2) != namespace {
			continue
		}
		for c := range subfields(p, 3) {
			for r := range subfields(c, 5) {
				n := 0
				for d := range subfields(r, 4) {
					if first(d, 2) == "gpu.nvidia.com" {
						n++
					}
				}
				switch claim := first(r, 2); {
				case n == 0:
				case first(c, 1) == container:
					ours[claim] += n
				default:
					others[claim] = true
				}
			}
		}
	}
	total := 0
	for claim, n := range ours {
		if !others[claim] {
			return nil, fmt.Errorf("no other container of the pod has our claim %s", claim)
		}
		total += n
	}
	if total == 0 {
		return nil, errors.New("our container has no claim on a card")
	}
	return []string{fmt.Sprintf("%s%d", allVisible, total)}, nil
}

// listPods calls PodResourcesLister.List and returns the answer's message.
func listPods(ctx context.Context, socket string) ([]byte, error) {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://kubelet/v1.PodResourcesLister/List", bytes.NewReader(make([]byte, 5)))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("TE", "trailers")
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20)) // gRPC's own limit for an answer
	if err != nil {
		return nil, err
	}
	status := resp.Trailer.Get("Grpc-Status")
	if status == "" {
		status = resp.Header.Get("Grpc-Status")
	}
	if resp.StatusCode != http.StatusOK || status != "0" {
		return nil, fmt.Errorf("kubelet answers %s, gRPC status %q", resp.Status, status)
	}
	if len(body) < 5 || body[0] != 0 || int(binary.BigEndian.Uint32(body[1:])) != len(body)-5 {
		return nil, errors.New("kubelet's answer is not one plain message")
	}
	return body[5:], nil
}

// podDevices picks our pod's NVIDIA devices out of a ListPodResourcesResponse.
func podDevices(message []byte, namespace, pod string) ([]string, error) {
	var out []string
	found := false
	// Field numbers: response 1 = pod; pod 1 = name, 2 = name space, 3 = container; container 2 = devices;
	// devices 1 = resource name, 2 = device id.
	for p := range subfields(message, 1) {
		if first(p, 1) != pod || first(p, 2) != namespace {
			continue
		}
		found = true
		for c := range subfields(p, 3) {
			for d := range subfields(c, 2) {
				if !strings.HasPrefix(first(d, 1), "nvidia.com/") {
					continue
				}
				for id := range subfields(d, 2) {
					if s := string(id); !slices.Contains(out, s) {
						out = append(out, s)
					}
				}
			}
		}
	}
	if !found {
		return nil, fmt.Errorf("the kubelet knows no pod %s/%s", namespace, pod)
	}
	return out, nil
}

// first is the first field of that number as text.
func first(message []byte, number uint64) string {
	for f := range subfields(message, number) {
		return string(f)
	}
	return ""
}

// subfields yields the length-delimited fields of that number. A message that is cut ends the walk.
func subfields(m []byte, number uint64) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(m) > 0 {
			tag, n := binary.Uvarint(m)
			if n <= 0 {
				return
			}
			m = m[n:]
			var value []byte
			switch tag & 7 {
			case 0:
				_, n = binary.Uvarint(m)
			case 1:
				n = 8
			case 5:
				n = 4
			case 2:
				size, k := binary.Uvarint(m)
				if k <= 0 || size > uint64(len(m)-k) {
					return
				}
				value = m[k : k+int(size)]
				n = k + int(size)
			default:
				return
			}
			if n <= 0 || n > len(m) {
				return
			}
			m = m[n:]
			if tag>>3 == number && tag&7 == 2 && !yield(value) {
				return
			}
		}
	}
}
