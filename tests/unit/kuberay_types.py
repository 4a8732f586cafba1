"""Types of a RayJob: the names and types of its fields in KubeRay 1.6.2, and of the fields of pods in Kubernetes."""

from typing import Literal

from lightkube.core.dictmixin import DictMixin
from lightkube.models.core_v1 import PodTemplateSpec, Service
from lightkube.models.meta_v1 import ObjectMeta


class AuthOptions(DictMixin):
    mode: Literal["disabled", "token"] | None = None
    secretName: str | None = None
    enableK8sTokenAuth: bool | None = None


class NodeGroup(DictMixin):
    """Fields that the head and a group of workers have in common."""

    template: PodTemplateSpec
    rayStartParams: dict[str, str] | None = None
    resources: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class HeadGroupSpec(NodeGroup):
    headService: Service | None = None
    enableIngress: bool | None = None
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] | None = None


class WorkerGroupSpec(NodeGroup, kw_only=True):
    groupName: str
    replicas: int | None = None
    minReplicas: int | None = None
    maxReplicas: int | None = None
    numOfHosts: int | None = None
    idleTimeoutSeconds: int | None = None
    suspend: bool | None = None


class RayClusterSpec(DictMixin):
    headGroupSpec: HeadGroupSpec
    workerGroupSpecs: list[WorkerGroupSpec] | None = None
    rayVersion: str | None = None
    authOptions: AuthOptions | None = None
    enableInTreeAutoscaling: bool | None = None
    headServiceAnnotations: dict[str, str] | None = None
    managedBy: str | None = None
    suspend: bool | None = None


class SubmitterConfig(DictMixin):
    backoffLimit: int | None = None


class RayJobSpec(DictMixin):
    rayClusterSpec: RayClusterSpec | None = None
    entrypoint: str | None = None
    entrypointNumCpus: float | None = None
    entrypointNumGpus: float | None = None
    entrypointResources: str | None = None
    runtimeEnvYAML: str | None = None
    jobId: str | None = None
    metadata: dict[str, str] | None = None
    clusterSelector: dict[str, str] | None = None
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"] | None = None
    submitterConfig: SubmitterConfig | None = None
    submitterPodTemplate: PodTemplateSpec | None = None
    backoffLimit: int | None = None
    activeDeadlineSeconds: int | None = None
    preRunningDeadlineSeconds: int | None = None
    shutdownAfterJobFinishes: bool | None = None
    ttlSecondsAfterFinished: int | None = None
    managedBy: str | None = None
    suspend: bool | None = None


class RayJob(DictMixin):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: ObjectMeta
    spec: RayJobSpec
