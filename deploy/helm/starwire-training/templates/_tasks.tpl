{{- /* The tasks of a job, as JSON: (dict "root" $ "job" "ps" "count" 2) → ["training-ps-0.training-ps:2222",…] */ -}}
{{- define "addresses" -}}
{{- $name := printf "%s-%s" .root.Release.Name .job -}}
{{- $all := list -}}
{{- range $i := until (int .count) -}}
{{- $all = append $all (printf "%s-%d.%s:%d" $name $i $name (int $.root.Values.port)) -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{- define "labels" -}}
{{ printf "{app.kubernetes.io/name: %s}" .Release.Name }}
{{- end -}}

{{- define "component" -}}
{{ printf "{app.kubernetes.io/name: %s, app.kubernetes.io/component: %s}" .root.Release.Name .job }}
{{- end -}}

{{- define "secret" -}}
{{ .Values.secretName | default (printf "%s-starwire" .Release.Name) }}
{{- end -}}

{{- define "identity" -}}
tasks.{{ .Release.Name }}
{{- end -}}

{{- /* The pod of a task: (dict "root" $ "job" "ps") */ -}}
{{- define "pod" -}}
automountServiceAccountToken: false
# Number 1 of the processes is then Kubernetes' own. A script that is number 1 does not end at SIGTERM, which the kernel drops.
shareProcessNamespace: true
# The group makes the secret readable for the user of the container, which is not root.
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
containers:
  - name: task
    image: {{ .root.Values.image }}
    # $0 is the job, $HOSTNAME ends in the task's number.
    command:
      - sh
      - -c
      - |
        export TF_CONFIG="{\"cluster\": $CLUSTER, \"task\": {\"type\": \"$0\", \"index\": ${HOSTNAME##*-}}}"
        exec starwire run "$@"
      - {{ .job }}
    args: {{ toJson .root.Values.args }}
    envFrom:
      - configMapRef: {name: {{ .root.Release.Name }}-cluster}
    ports:
      - {name: starwire, containerPort: {{ .root.Values.port }}}
    {{- if eq .job "ps" }}
    {{- $how := printf "grpc: {port: %d}" (int .root.Values.port) }}
    {{- if eq .root.Values.proof "tls" }}
    # The kubelet's own gRPC probes have no certificate.
    {{- $how = printf "exec: {command: [starctl, health, \"127.0.0.1:%d\"]}" (int .root.Values.port) }}
    {{- end }}
    readinessProbe:
      {{ $how }}
      periodSeconds: 5
      {{- if eq .root.Values.proof "tls" }}
      timeoutSeconds: 5
      {{- end }}
    # A server that moves here opens its port when it has copied the state: it has an hour.
    startupProbe:
      tcpSocket: {port: starwire}
      periodSeconds: 5
      failureThreshold: 720
    # Only whether the port is open: a server that reads its state, has moved, or has an expired certificate must not be restarted.
    livenessProbe:
      tcpSocket: {port: starwire}
      periodSeconds: 20
      timeoutSeconds: 5
      failureThreshold: 6
    {{- end }}
    resources: {{ toJson (index .root.Values .job).resources }}
    securityContext:
      allowPrivilegeEscalation: false
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: secret, mountPath: /etc/starwire, readOnly: true}
volumes:
  - name: secret
    secret:
      secretName: {{ include "secret" .root }}
      defaultMode: 0440
{{- end -}}
