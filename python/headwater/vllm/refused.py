"""The back end of versions of vLLM that are not served: it is chosen only to say why it cannot be."""

from vllm.v1.attention.backend import AttentionBackend

from . import Settings, installed, refusal


class RefusedBackend(AttentionBackend):
    @classmethod
    def validate_configuration(cls, *args, **kwargs):
        return [refusal(*installed(), Settings())]

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError(refusal(*installed(), Settings()))

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError(refusal(*installed(), Settings()))

    @staticmethod
    def get_kv_cache_shape(*args, **kwargs):
        raise NotImplementedError(refusal(*installed(), Settings()))
