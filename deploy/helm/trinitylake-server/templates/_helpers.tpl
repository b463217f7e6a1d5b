{{- define "trinitylake.fullname" -}}
{{- if contains "trinitylake" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-trinitylake" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "trinitylake.selector" -}}
app.kubernetes.io/name: trinitylake
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trinitylake.labels" -}}
{{ include "trinitylake.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "trinitylake.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "trinitylake.serverAccount" -}}
{{ .Values.serviceAccount.name | default (include "trinitylake.fullname" .) }}
{{- end -}}

{{- define "trinitylake.maintenanceAccount" -}}
{{ .Values.maintenance.serviceAccount.name | default (printf "%s-maintenance" (include "trinitylake.fullname" .)) }}
{{- end -}}

{{- /* Settings of all pods: user, scheduling, and a writable /tmp only. */ -}}
{{- define "trinitylake.pod" -}}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.userId }}
  runAsGroup: {{ .Values.userId }}
  fsGroup: {{ .Values.userId }}
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "trinitylake.container" -}}
image: {{ include "trinitylake.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with .Values.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Fail for a root that no pod can reach: a path outside the volumes, and the memory of a process. */ -}}
{{- define "trinitylake.checkRoots" -}}
{{- range $name, $settings := .Values.lakehouses }}
{{- range $root := prepend ($settings.allowed_roots | default list) $settings.root }}
{{- if hasPrefix "memory://" $root }}
{{- fail (printf "lakehouses.%s: the root %s is in the memory of one process; choose a storage that all pods can access" $name $root) }}
{{- end }}
{{- if or (hasPrefix "/" $root) (hasPrefix "file://" $root) }}
{{- $path := printf "%s/" (clean (trimPrefix "file://" $root)) }}
{{- $mounted := dict }}
{{- range $.Values.volumeMounts }}
{{- if hasPrefix (printf "%s/" (clean .mountPath)) $path }}
{{- $_ := set $mounted "is" true }}
{{- end }}
{{- end }}
{{- if not $mounted.is }}
{{- fail (printf "lakehouses.%s: %s is a path, and no volume is mounted there, so its files would be lost with the pod; choose another storage, or add volumes and volumeMounts" $name $root) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
