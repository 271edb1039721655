{{- define "fairlead.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "fairlead.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "fairlead.fullname" .) }}
{{- end }}

{{/* The selector of the Deployment and of the NetworkPolicy peer: the operator's pods, not those of `helm test`. */}}
{{- define "fairlead.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "fairlead.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image reference: `registry` replaces all but the last part of the repository, the digest wins over the tag, the
tag defaults to the chart's appVersion. */}}
{{- define "fairlead.image" -}}
{{- $name := .image.repository }}
{{- with .root.Values.registry }}{{ $name = printf "%s/%s" . (base $name) }}{{ end }}
{{- if .image.digest }}{{ $name }}@{{ .image.digest }}
{{- else }}{{ $name }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* The image of pods with accelerators. Without a value of its own it is what runtime.image names; where that names
nothing either, the GPU build of the chart's version. `--reuse-values` brings values that lack runtime.acceleratorImage. */}}
{{- define "fairlead.acceleratorImage" -}}
{{- $both := .Values.runtime.image }}
{{- $own := .Values.runtime.acceleratorImage | default dict }}
{{- $default := eq $both.repository "docker.io/fairlead/runtime" | and (not $both.tag) (not $both.digest) }}
{{- if or $default $own.repository $own.tag $own.digest }}
{{- $tag := $own.tag | default (printf "%s-cuda" .Chart.AppVersion) }}
{{- $repository := $own.repository | default $both.repository }}
{{- include "fairlead.image" (dict "image" (dict "repository" $repository "tag" $tag "digest" $own.digest) "root" .) }}
{{- else }}{{ include "fairlead.image" (dict "image" $both "root" .) }}{{ end }}
{{- end }}

{{/* The name of the objects of `helm test`. A release's name may start with a digit and hold dots; an InferenceDeployment's may not. */}}
{{- define "fairlead.test" -}}
test-{{ .Release.Name | replace "." "-" | trunc 34 | trimSuffix "-" }}
{{- end }}

{{/* The served namespaces without scope.cluster, the release's own first, as a JSON list. */}}
{{- define "fairlead.namespaces" -}}
{{ prepend .Values.scope.namespaces .Release.Namespace | uniq | toJson }}
{{- end }}

{{/* Group of a claim's files; 0 leaves it to the platform: OpenShift has one for each namespace. */}}
{{- define "fairlead.fsGroup" -}}
{{- if not (kindIs "invalid" .Values.fsGroup) }}{{ int64 .Values.fsGroup }}
{{- else if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}0
{{- else }}10001{{ end }}
{{- end }}

{{/* NetworkPolicy peers that may read the admin port: this operator's pods, then metrics.from. */}}
{{- define "fairlead.adminPeers" -}}
{{- $own := dict
      "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace))
      "podSelector" (dict "matchLabels" (include "fairlead.selector" . | fromYaml)) -}}
{{ prepend .Values.metrics.from $own | toJson }}
{{- end }}

{{/* The operator's rights in a namespace that it serves. The cluster tests check that it uses each verb and needs no other. */}}
{{- define "fairlead.rules" -}}
- apiGroups: [serving.fairlead.dev]
  resources: [inferencedeployments]
  verbs: [get, list, watch]
- apiGroups: [serving.fairlead.dev]
  resources: [inferencedeployments/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods, resourcequotas]
  verbs: [list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, watch, create]
{{- if .Values.modelCache.create }}
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
{{- end }}
{{- end }}
