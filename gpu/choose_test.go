package gpu

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func handles(us []unit) []int {
	var out []int
	for _, u := range us {
		out = append(out, u.handle)
	}
	return out
}

func TestChoose(t *testing.T) {
	mixed := cards(2)
	mixed.units[1].name = "NVIDIA L4"
	found := func(names ...string) Finder {
		return Finder{Method: "finder", Find: func() ([]string, error) { return names, nil }}
	}
	broken := Finder{Method: "broken", Find: func() ([]string, error) { return nil, errors.New("no socket") }}
	for _, c := range []struct {
		name   string
		drv    *fakeDriver
		cfg    Config
		want   []int
		method string
		err    string
	}{
		{"one card", cards(1), Config{}, []int{0}, "the only visible card", ""},
		{"no card", cards(0), Config{}, nil, "", "no card is visible"},
		{"one slice", sliced(0, 1), Config{}, []int{100}, "the only visible card", ""},
		{"several cards", cards(4), Config{}, nil, "", "cannot tell which of 4 cards is ours: set GRAPEVINE_GPU_DEVICES"},
		{"several slices", sliced(0, 3), Config{}, nil, "", "cannot tell which of 3 cards is ours"},
		{"a card and a slice", sliced(1, 1), Config{}, nil, "", "cannot tell which of 2 cards is ours"},

		{"index", cards(4), Config{Devices: "2"}, []int{2}, "GRAPEVINE_GPU_DEVICES", ""},
		{"list", cards(4), Config{Devices: " 3, 1 ,3"}, []int{3, 1}, "GRAPEVINE_GPU_DEVICES", ""},
		{"all", cards(3), Config{Devices: "all"}, []int{0, 1, 2}, "GRAPEVINE_GPU_DEVICES", ""},
		{"none", cards(3), Config{Devices: "none"}, nil, "", "no card is assigned"},
		{"UUID", cards(3), Config{Devices: "GPU-b0000000"}, []int{1}, "GRAPEVINE_GPU_DEVICES", ""},
		{"beginning of a UUID", cards(3), Config{Devices: "GPU-c"}, []int{2}, "GRAPEVINE_GPU_DEVICES", ""},
		{"no such UUID", cards(3), Config{Devices: "GPU-x"}, nil, "", "no card or slice GPU-x is visible"},
		{"no such index", cards(3), Config{Devices: "3"}, nil, "", "no card 3 is visible"},
		{"slice", sliced(1, 3), Config{Devices: "1:2"}, []int{102}, "GRAPEVINE_GPU_DEVICES", ""},
		{"slice by UUID", sliced(1, 3), Config{Devices: "MIG-b"}, []int{101}, "GRAPEVINE_GPU_DEVICES", ""},
		{"a sliced card is its slices", sliced(1, 2), Config{Devices: "1"}, []int{100, 101}, "GRAPEVINE_GPU_DEVICES", ""},
		{"setting over environment", cards(4), Config{Devices: "2", Env: []string{"CUDA_VISIBLE_DEVICES=1"}}, []int{2}, "GRAPEVINE_GPU_DEVICES", ""},

		{"CUDA index", cards(4), Config{Env: []string{"CUDA_VISIBLE_DEVICES=1,0"}}, []int{1, 0}, "CUDA_VISIBLE_DEVICES", ""},
		{"CUDA stops at the first invalid entry", cards(4), Config{Env: []string{"CUDA_VISIBLE_DEVICES=1,9,2"}}, []int{1}, "CUDA_VISIBLE_DEVICES", ""},
		{"CUDA stops at a repetition", cards(4), Config{Env: []string{"CUDA_VISIBLE_DEVICES=1,1,2"}}, []int{1}, "CUDA_VISIBLE_DEVICES", ""},
		{"CUDA none", cards(4), Config{Env: []string{"CUDA_VISIBLE_DEVICES=-1"}}, nil, "", "no card is assigned"},
		{"CUDA empty", cards(4), Config{Env: []string{"CUDA_VISIBLE_DEVICES="}}, nil, "", "no card is assigned"},
		{"CUDA slice", sliced(0, 3), Config{Env: []string{"CUDA_VISIBLE_DEVICES=MIG-c"}}, []int{102}, "CUDA_VISIBLE_DEVICES", ""},
		{"CUDA's order is not NVML's", mixed, Config{Env: []string{"CUDA_VISIBLE_DEVICES=0"}}, nil, "", "CUDA's order and the cards differ"},
		{"unless it is", mixed, Config{Env: []string{"CUDA_VISIBLE_DEVICES=0", "CUDA_DEVICE_ORDER=PCI_BUS_ID"}}, []int{0}, "CUDA_VISIBLE_DEVICES", ""},
		{"or does not matter", mixed, Config{Env: []string{"CUDA_VISIBLE_DEVICES=1,0"}}, []int{1, 0}, "CUDA_VISIBLE_DEVICES", ""},
		{"or UUIDs tell", mixed, Config{Env: []string{"CUDA_VISIBLE_DEVICES=GPU-b"}}, []int{1}, "CUDA_VISIBLE_DEVICES", ""},

		{"runtime: all tells nothing", cards(4), Config{Env: []string{"NVIDIA_VISIBLE_DEVICES=all"}}, nil, "", "cannot tell which of 4"},
		{"runtime: void tells nothing", cards(1), Config{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}}, []int{0}, "the only visible card", ""},
		{"runtime: none", cards(1), Config{Env: []string{"NVIDIA_VISIBLE_DEVICES=none"}}, nil, "", "no card is assigned"},
		{"runtime: UUIDs", cards(4), Config{Env: []string{"NVIDIA_VISIBLE_DEVICES=GPU-d,GPU-a"}}, []int{3, 0}, "NVIDIA_VISIBLE_DEVICES", ""},
		{"runtime: indices of the host, counted anew here", cards(2), Config{Env: []string{"NVIDIA_VISIBLE_DEVICES=5,7"}}, []int{0, 1}, "NVIDIA_VISIBLE_DEVICES", ""},
		{"runtime: other devices than we see", cards(4), Config{Env: []string{"NVIDIA_VISIBLE_DEVICES=5,7"}}, nil, "", "cannot tell which of 4"},

		{"finder", cards(4), Config{Finders: []Finder{broken, found(), found("GPU-c0000000", "GPU-d0000000")}}, []int{2, 3}, "finder", ""},
		{"finder by device file", cards(4), Config{Finders: []Finder{found("/dev/nvidia1", "/dev/nvidiactl")}}, []int{1}, "finder", ""},
		{"finder with shared cards", cards(4), Config{Finders: []Finder{found("GPU-b0000000::3")}}, []int{1}, "finder", ""},
		{"a device file does not tell the slice", sliced(1, 2), Config{Finders: []Finder{found("/dev/nvidia1")}}, nil, "", "cannot tell which of 3"},
		{"finders that fail say why", cards(4), Config{Finders: []Finder{broken}}, nil, "", "broken: no socket"},
		{"finders are not asked where one card is seen", cards(1), Config{Finders: []Finder{found("GPU-x")}}, []int{0}, "the only visible card", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			us, method, err := choose(c.drv.units, c.cfg)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				assert.Nil(t, us)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, handles(us))
			assert.Equal(t, c.method, method)
		})
	}
}

func TestCheckDevices(t *testing.T) {
	for _, good := range []string{"", "all", "none", "0", "0,3", "0:1", "GPU-1234, MIG-abc"} {
		assert.NoError(t, CheckDevices(good), good)
	}
	for _, bad := range []string{"first", "0,", "-1", "0:x", "GPU-", "0:1:2", "all,1", "GPU-1:2"} {
		assert.Error(t, CheckDevices(bad), bad)
	}
}
