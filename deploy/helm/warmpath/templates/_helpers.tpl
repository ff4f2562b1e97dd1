{{/* Name of every object of a release: "warmpath", or RELEASE-warmpath. */}}
{{- define "warmpath.name" -}}
{{- if contains "warmpath" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-warmpath" (.Release.Name | trunc 31 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{/* Labels that select the pods of a component: (list . "web"). */}}
{{- define "warmpath.selector" -}}
app.kubernetes.io/name: warmpath
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object: (list . "web"). */}}
{{- define "warmpath.labels" -}}
{{ include "warmpath.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* An image: (list . "controlplane"). */}}
{{- define "warmpath.image" -}}
{{- $values := (index . 0).Values.image -}}
{{- with $values.registry }}{{ . }}/{{ end }}warmpath-{{ index . 1 }}:{{ $values.tag | default (index . 0).Chart.AppVersion }}
{{- end }}

{{/* Fields that all pods share. */}}
{{- define "warmpath.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Pods of a component spread over nodes and zones where possible: (list . "web"). */}}
{{- define "warmpath.spread" -}}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "warmpath.selector" $ | nindent 8 }}
{{- end }}
{{- end }}

{{- define "warmpath.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Settings of web, worker, beat and of the migration. */}}
{{- define "warmpath.controlPlaneEnv" -}}
{{- $keys := .Values.secret.keys -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: DJANGO_SETTINGS_MODULE, value: controlplane.settings.production}
- {name: WARMPATH_ALLOWED_HOSTS, value: "{{ join "," (prepend .Values.extraHosts .Values.host) }},{{ include "warmpath.name" . }}-web,$(POD_IP)"}
- {name: WARMPATH_PUBLIC_URL, value: "https://{{ .Values.host }}"}
- {name: WARMPATH_BEHIND_TLS_PROXY, value: "1"}
- {name: WARMPATH_LOG_FORMAT, value: json}
- {name: WARMPATH_SECRET_KEY_FILE, value: /run/secrets/warmpath/secret_key}
- {name: WARMPATH_ROUTER_ADMIN_TOKEN_FILE, value: /run/secrets/warmpath/router_admin_token}
- {name: WARMPATH_DATABASE_URL_FILE, value: /run/secrets/warmpath/database_url}
- {name: WARMPATH_REDIS_URL_FILE, value: /run/secrets/warmpath/redis_url}
{{- if $keys.metricsToken }}
- {name: WARMPATH_METRICS_TOKEN_FILE, value: /run/secrets/warmpath/metrics_token}
{{- end }}
{{- include "warmpath.variables" .Values.controlPlane }}
{{- end }}

{{- define "warmpath.controlPlaneVolumes" -}}
- name: secrets
  secret:
    secretName: {{ .Values.secret.name | quote }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.secret.keys.secretKey | quote }}, path: secret_key}
      - {key: {{ .Values.secret.keys.routerAdminToken | quote }}, path: router_admin_token}
      - {key: {{ .Values.secret.keys.databaseUrl | quote }}, path: database_url}
      - {key: {{ .Values.secret.keys.redisUrl | quote }}, path: redis_url}
      {{- with .Values.secret.keys.metricsToken }}
      - {key: {{ . | quote }}, path: metrics_token}
      {{- end }}
      {{- include "warmpath.secretItems" .Values.controlPlane | nindent 6 }}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 256Mi}
{{- with .Values.controlPlane.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "warmpath.controlPlaneMounts" -}}
- {name: secrets, mountPath: /run/secrets/warmpath, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- with .Values.controlPlane.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Variables of controlPlane or router: env as it is, and of secretEnv the path of the mounted file. */}}
{{- define "warmpath.variables" -}}
{{- range $name, $value := .env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- range $name, $key := .secretEnv }}
- {name: {{ $name }}_FILE, value: /run/secrets/warmpath/{{ $name | lower }}}
{{- end }}
{{- end }}

{{/* The keys of secretEnv as items of the mounted Secret. */}}
{{- define "warmpath.secretItems" -}}
{{- range $name, $key := .secretEnv }}
- {key: {{ $key | quote }}, path: {{ $name | lower }}}
{{- end }}
{{- end }}
