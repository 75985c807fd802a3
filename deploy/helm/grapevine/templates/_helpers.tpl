{{- define "grapevine.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "grapevine.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "grapevine.selector" -}}
app.kubernetes.io/name: {{ include "grapevine.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "grapevine.labels" -}}
{{ include "grapevine.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: replica
app.kubernetes.io/part-of: grapevine
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "grapevine.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "grapevine.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "grapevine.secret" -}}
{{- default (printf "%s-gossip" (include "grapevine.fullname" .)) .Values.gossip.existingSecret -}}
{{- end }}

{{- define "grapevine.headless" -}}
{{- printf "%s-agents" (include "grapevine.fullname" .) -}}
{{- end }}

{{- define "grapevine.enginePort" -}}
{{- if .Values.engine.port -}}{{ .Values.engine.port }}
{{- else if eq .Values.engine.kind "sglang" -}}30000
{{- else -}}8000
{{- end -}}
{{- end }}

{{- define "grapevine.engineHost" -}}
{{- ternary "127.0.0.1" "0.0.0.0" (eq .Values.mode "isolated") -}}
{{- end }}

{{/* The engine's command line by its kind. */}}
{{- define "grapevine.engineArgs" -}}
{{- $host := include "grapevine.engineHost" . -}}
{{- $port := include "grapevine.enginePort" . -}}
{{- if eq .Values.engine.kind "vllm" }}
- --model
- {{ required "engine.model is needed: the model to serve" .Values.engine.model | quote }}
- --host
- {{ $host | quote }}
- --port
- {{ $port | quote }}
{{- else if eq .Values.engine.kind "sglang" }}
- python3
- -m
- sglang.launch_server
- --model-path
- {{ required "engine.model is needed: the model to serve" .Values.engine.model | quote }}
- --host
- {{ $host | quote }}
- --port
- {{ $port | quote }}
- --enable-metrics
{{- else if eq .Values.engine.kind "llamacpp" }}
- --model
- {{ required "engine.model is needed: the model file to serve" .Values.engine.model | quote }}
- --host
- {{ $host | quote }}
- --port
- {{ $port | quote }}
- --metrics
- --slots
{{- end }}
{{- range .Values.engine.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Values that would render but not work are refused here, each with what is allowed. */}}
{{- define "grapevine.validate" -}}
{{- if not (has .Values.mode (list "isolated" "open")) }}{{ fail (printf "mode is %q; allowed: isolated, open" .Values.mode) }}{{ end }}
{{- if not (has .Values.engine.kind (list "vllm" "sglang" "llamacpp")) }}{{ fail (printf "engine.kind is %q; allowed: vllm, sglang, llamacpp" .Values.engine.kind) }}{{ end }}
{{- if not (has .Values.agent.qos (list "guaranteed" "burstable")) }}{{ fail (printf "agent.qos is %q; allowed: guaranteed, burstable" .Values.agent.qos) }}{{ end }}
{{- if not (has .Values.agent.gpu.mode (list "none" "visible" "explicit" "dra" "podResources")) }}{{ fail (printf "agent.gpu.mode is %q; allowed: none, visible, explicit, dra, podResources" .Values.agent.gpu.mode) }}{{ end }}
{{- if and (eq .Values.agent.gpu.mode "explicit") (eq (toString .Values.agent.gpu.devices) "") }}{{ fail "agent.gpu.mode is \"explicit\": agent.gpu.devices must name the cards" }}{{ end }}
{{- if and (eq .Values.agent.gpu.mode "dra") (not .Values.agent.gpu.claim) }}{{ fail "agent.gpu.mode is \"dra\": agent.gpu.claim must name a ResourceClaimTemplate" }}{{ end }}
{{- if ne .Values.agent.drainTimeout (printf "%ds" (int .Values.agent.drainSeconds)) }}{{ fail (printf "agent.drainTimeout is %q and agent.drainSeconds is %d; they must say the same" .Values.agent.drainTimeout (int .Values.agent.drainSeconds)) }}{{ end }}
{{- end }}
