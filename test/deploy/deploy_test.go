package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	chartDir   = "../../deploy/helm/grapevine"
	exampleDir = "../../deploy/kustomize/example"
)

// kinds are the Go types of what our manifests hold; a kind that is missing here is an error.
var kinds = map[string]func() any{
	"apps/v1 Deployment":                 func() any { return new(appsv1.Deployment) },
	"v1 Service":                         func() any { return new(corev1.Service) },
	"v1 Secret":                          func() any { return new(corev1.Secret) },
	"v1 ServiceAccount":                  func() any { return new(corev1.ServiceAccount) },
	"networking.k8s.io/v1 NetworkPolicy": func() any { return new(networkingv1.NetworkPolicy) },
	"policy/v1 PodDisruptionBudget":      func() any { return new(policyv1.PodDisruptionBudget) },
}

// decode reads manifests as the API server does with strict validation: unknown and repeated fields are errors.
func decode(manifests string) (objects []any, err error) {
	for i, doc := range strings.Split(manifests, "\n---") {
		if strings.TrimSpace(strings.TrimPrefix(doc, "---")) == "" || onlyComments(doc) {
			continue
		}
		var head struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		name := head.APIVersion + " " + head.Kind
		make := kinds[name]
		if make == nil {
			return nil, fmt.Errorf("document %d: unexpected kind %q", i, name)
		}
		o := make()
		if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		objects = append(objects, o)
	}
	if len(objects) == 0 {
		return nil, errors.New("no objects")
	}
	return objects, nil
}

func onlyComments(doc string) bool {
	for line := range strings.Lines(doc) {
		if line = strings.TrimSpace(line); line != "" && line != "---" && !strings.HasPrefix(line, "#") {
			return false
		}
	}
	return true
}

// helm renders the chart with a values file.
func helm(values string) (string, error) {
	c, err := loader.Load(chartDir)
	if err != nil {
		return "", err
	}
	v, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		return "", err
	}
	all, err := chartutil.ToRenderValues(c, v, chartutil.ReleaseOptions{Name: "llm", Namespace: "default", Revision: 1, IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	e := engine.Engine{Strict: true}
	files, err := e.Render(c, all)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(keys(files)) {
		if strings.HasSuffix(name, ".yaml") && strings.TrimSpace(files[name]) != "" {
			out.WriteString("---\n" + files[name] + "\n")
		}
	}
	return out.String(), nil
}

func keys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func kustomize(t *testing.T, dir string) string {
	t.Helper()
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	require.NoError(t, err)
	b, err := m.AsYaml()
	require.NoError(t, err)
	return string(b)
}

// rendered is what every mode gives, by name.
func rendered(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	files, err := filepath.Glob(chartDir + "/ci/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		out["helm "+filepath.Base(f)], err = helm(string(b))
		require.NoError(t, err, f)
	}
	// Both modes with both classes and all ways to tell the card, for one engine.
	for _, mode := range []string{"isolated", "open"} {
		for _, qos := range []string{"guaranteed", "burstable"} {
			for _, gpu := range []string{"{ mode: none }", "{ mode: visible }", `{ mode: explicit, devices: "0" }`, "{ mode: dra, claim: one }", "{ mode: podResources }"} {
				name := fmt.Sprintf("helm %s %s %s", mode, qos, gpu)
				var err error
				out[name], err = helm(fmt.Sprintf("mode: %s\nengine: { kind: vllm, image: e, model: m }\nagent: { qos: %s, gpu: %s }\n", mode, qos, gpu))
				require.NoError(t, err, name)
			}
		}
	}
	out["kustomize example"] = kustomize(t, exampleDir)
	return out
}

// TestManifests: every mode decodes strictly into the API's own types, and holds what an agent needs in a pod.
func TestManifests(t *testing.T) {
	for name, text := range rendered(t) {
		objects, err := decode(text)
		if !assert.NoError(t, err, name) {
			continue
		}
		count := map[string]int{}
		for _, o := range objects {
			count[fmt.Sprintf("%T", o)]++
			switch o := o.(type) {
			case *appsv1.Deployment:
				checkPod(t, name, &o.Spec.Template.Spec)
				assert.Equal(t, "grapevine", o.Labels["app.kubernetes.io/part-of"]+map[bool]string{true: "grapevine"}[strings.HasPrefix(name, "kustomize")], name)
			case *networkingv1.NetworkPolicy:
				var protocols []string
				for _, in := range o.Spec.Ingress {
					for _, p := range in.Ports {
						if p.Protocol != nil {
							protocols = append(protocols, string(*p.Protocol))
						}
					}
				}
				assert.Contains(t, protocols, "UDP", "%s: gossip needs UDP", name)
				assert.Contains(t, protocols, "TCP", name)
			}
		}
		t.Logf("%-60s %v", name, count)
		assert.Equal(t, 1, count["*v1.Deployment"], name)
		assert.Equal(t, 2, count["*v1.Service"], name)
		assert.Equal(t, 1, count["*v1.NetworkPolicy"], name)
		assert.Equal(t, 1, count["*v1.PodDisruptionBudget"], name)
		headless := false
		for _, o := range objects {
			if s, ok := o.(*corev1.Service); ok && s.Spec.ClusterIP == "None" {
				headless = true
				assert.True(t, s.Spec.PublishNotReadyAddresses, name)
			}
		}
		assert.True(t, headless, name)
	}
}

// checkPod holds the rules of a pod with an agent (design: the life of a process).
func checkPod(t *testing.T, name string, pod *corev1.PodSpec) {
	t.Helper()
	i := slices.IndexFunc(pod.InitContainers, func(c corev1.Container) bool { return c.Name == "grapevine" })
	if !assert.GreaterOrEqual(t, i, 0, "%s: the agent is a native sidecar", name) {
		return
	}
	c := pod.InitContainers[i]
	if assert.NotNil(t, c.RestartPolicy, name) {
		assert.Equal(t, corev1.ContainerRestartPolicyAlways, *c.RestartPolicy, name)
	}
	if assert.NotNil(t, c.StartupProbe, name) && assert.NotNil(t, c.LivenessProbe, name) && assert.NotNil(t, c.ReadinessProbe, name) {
		assert.Equal(t, "/livez", c.StartupProbe.HTTPGet.Path, "%s: never readiness: the engine starts only after this probe", name)
		assert.Equal(t, "/livez", c.LivenessProbe.HTTPGet.Path, name)
		assert.Equal(t, "/readyz", c.ReadinessProbe.HTTPGet.Path, name)
	}
	if assert.NotNil(t, c.Lifecycle, name) && assert.NotNil(t, c.Lifecycle.PreStop, name) && assert.NotNil(t, c.Lifecycle.PreStop.Exec, name) {
		assert.Equal(t, []string{"drain", "--no-wait"}, c.Lifecycle.PreStop.Exec.Command[1:], name)
	}
	if assert.NotNil(t, pod.TerminationGracePeriodSeconds, name) {
		assert.Equal(t, int64(315), *pod.TerminationGracePeriodSeconds, "%s: drain timeout + 15", name)
	}
	s := c.SecurityContext
	if assert.NotNil(t, s, name) {
		socket := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return strings.HasSuffix(m.MountPath, "pod-resources") })
		assert.True(t, s.RunAsNonRoot != nil && *s.RunAsNonRoot != socket, "%s: root only where the kubelet's socket is read", name)
		assert.True(t, s.RunAsUser != nil && (*s.RunAsUser == 0) == socket, name)
		assert.True(t, s.ReadOnlyRootFilesystem != nil && *s.ReadOnlyRootFilesystem, name)
		assert.True(t, s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation, name)
		assert.True(t, s.Capabilities != nil && slices.Contains(s.Capabilities.Drop, "ALL"), name)
	}
	assert.NotContains(t, c.Resources.Limits, corev1.ResourceName("nvidia.com/gpu"), "%s: the agent reserves no GPU", name)
	if strings.Contains(name, "guaranteed") {
		assert.Equal(t, c.Resources.Limits, c.Resources.Requests, name)
		assert.NotEmpty(t, c.Resources.Limits.Cpu().String(), name)
	}
	if assert.Len(t, pod.Containers, 1, name) {
		e := pod.Containers[0]
		if assert.NotNil(t, e.Lifecycle, name) && assert.NotNil(t, e.Lifecycle.PreStop, name) {
			assert.Equal(t, "/drained", e.Lifecycle.PreStop.HTTPGet.Path, name)
		}
		if strings.Contains(name, "isolated") {
			assert.Contains(t, strings.Join(append(slices.Clone(e.Command), e.Args...), " "), "--host 127.0.0.1", name)
			assert.Equal(t, "/engine/health", e.LivenessProbe.HTTPGet.Path, "%s: the kubelet cannot reach loopback", name)
		}
	}
}

// TestBrokenManifestsAreRefused: the check can fail.
func TestBrokenManifestsAreRefused(t *testing.T) {
	for name, broken := range map[string]string{
		"unknown field":  "apiVersion: v1\nkind: Service\nmetadata: { name: a }\nspec: { selectors: { a: b } }\n",
		"repeated field": "apiVersion: v1\nkind: Service\nmetadata: { name: a, name: b }\n",
		"wrong type":     "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: { name: a }\nspec: { maxUnavailable: [1] }\n",
		"other kind":     "apiVersion: v1\nkind: Pod\nmetadata: { name: a }\n",
		"nothing":        "# only a comment\n",
	} {
		_, err := decode(broken)
		assert.Error(t, err, name)
	}
}

// TestValuesAreChecked: values that would render into something that does not work are refused in words.
func TestValuesAreChecked(t *testing.T) {
	for _, row := range []struct{ values, want string }{
		{"mode: closed\nengine: { image: e, model: m }", "mode is \"closed\"; allowed: isolated, open"},
		{"engine: { kind: tgi, image: e, model: m }", "engine.kind is \"tgi\""},
		{"engine: { image: e }", "engine.model is needed"},
		{"engine: { model: m }", "engine.image"},
		{"engine: { image: e, model: m }\nagent: { gpu: { mode: explicit } }", "agent.gpu.devices"},
		{"engine: { image: e, model: m }\nagent: { gpu: { mode: dra } }", "agent.gpu.claim"},
		{"engine: { image: e, model: m }\nagent: { drainSeconds: 60 }", "must say the same"},
	} {
		_, err := helm(row.values)
		assert.ErrorContains(t, err, row.want, row.values)
	}
}

// TestComponentOnAnotherChart: the component patches what another chart rendered, as a Helm post-renderer does.
func TestComponentOnAnotherChart(t *testing.T) {
	fs := filesys.MakeFsOnDisk()
	dir := t.TempDir()
	component, err := filepath.Abs("../../deploy/kustomize/component")
	require.NoError(t, err)
	local := filepath.Join(dir, "component")
	require.NoError(t, os.CopyFS(local, os.DirFS(component)))
	example, err := os.ReadFile(exampleDir + "/vllm.yaml")
	require.NoError(t, err)
	foreign := bytes.ReplaceAll(example, []byte("name: vllm"), []byte("name: their-vllm"))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "all.yaml"), foreign, 0o600))
	k, err := os.Open(exampleDir + "/kustomization.yaml")
	require.NoError(t, err)
	defer k.Close()
	text, err := io.ReadAll(k)
	require.NoError(t, err)
	for old, now := range map[string]string{"vllm.yaml": "all.yaml", "../component": "component", "name: vllm }": "name: their-vllm }"} {
		text = bytes.ReplaceAll(text, []byte(old), []byte(now))
	}
	require.NoError(t, fs.WriteFile(filepath.Join(dir, "kustomization.yaml"), text))
	objects, err := decode(kustomize(t, dir))
	require.NoError(t, err)
	for _, o := range objects {
		if d, ok := o.(*appsv1.Deployment); ok {
			assert.Equal(t, "their-vllm", d.Name)
			checkPod(t, "component", &d.Spec.Template.Spec)
		}
	}
}
