"""Flags of ``vllm serve`` that an engine which we start cannot be given, and why.

Rules of this file: pure. vLLM's parser takes underscores for hyphens and the beginning of a flag for the whole, so both
are looked at here as there. Three kinds: those by which an engine joins this server; those that this server has
itself; and those of vLLM's own server, which is not started: an engine without it would pass over them in silence.
"""

from __future__ import annotations

__all__ = ["why_not"]

_ALWAYS = "which is always given"
_JOINS = "which would make it more than the one engine that joins this server"
_MODEL = "though the model stands before the --"
_FLAGS = "and this server could not know what is in it"
_SERVERS = "which is an option of this server, before the --"
_PASSED_ON = "which is an option of this server, before the --, and is passed on"
_MODELS_OWN = "though this server reads the model's own tokenizer"
_NO_SERVER = "which is for vLLM's own API server, and that is not started"

# "-dp" and all that begins so.
_SHORT = {"-dp": _JOINS, "-asc": _JOINS}

_LONG = {
    "headless": _ALWAYS,
    "no-headless": _ALWAYS,
    "model": _MODEL,
    "model-tag": _MODEL,
    "config": _FLAGS,
    **dict.fromkeys(
        ("host", "port", "served-model-name", "lora-modules", "stream-interval"), _SERVERS
    ),
    **dict.fromkeys(("tokenizer", "tokenizer-revision"), _MODELS_OWN),
    **dict.fromkeys(("max-logprobs", "scheduling-policy"), _PASSED_ON),
    **dict.fromkeys(
        (
            "api-server-count",
            "data-parallel-address",
            "data-parallel-backend",
            "data-parallel-external-lb",
            "data-parallel-hybrid-lb",
            "data-parallel-multi-port-external-lb",
            "data-parallel-rank",
            "data-parallel-rpc-port",
            "data-parallel-size",
            "data-parallel-size-local",
            "data-parallel-start-rank",
        ),
        _JOINS,
    ),
    **dict.fromkeys(
        (
            "allow-credentials",
            "allowed-headers",
            "allowed-methods",
            "allowed-origins",
            "api-key",
            "chat-template",
            "chat-template-content-format",
            "default-chat-template-kwargs",
            "disable-access-log-for-endpoints",
            "disable-fastapi-docs",
            "disable-uvicorn-access-log",
            "enable-auto-tool-choice",
            "enable-force-include-usage",
            "enable-log-deltas",
            "enable-log-outputs",
            "enable-log-requests",
            "enable-offline-docs",
            "enable-prompt-tokens-details",
            "enable-request-id-headers",
            "enable-server-load-tracking",
            "enable-ssl-refresh",
            "enable-tokenizer-info-endpoint",
            "exclude-tools-when-tool-choice-none",
            "fingerprint-mode",
            "fingerprint-value",
            "generation-config",
            "grpc",
            "grpc-port",
            "h11-max-header-count",
            "h11-max-incomplete-event-size",
            "max-log-len",
            "max-num-queued-reqs",
            "max-num-queued-tokens",
            "middleware",
            "override-generation-config",
            "reasoning-parser",
            "reasoning-parser-plugin",
            "response-role",
            "return-tokens-as-token-ids",
            "root-path",
            "sse-keep-alive-interval",
            "ssl-ca-certs",
            "ssl-cert-reqs",
            "ssl-certfile",
            "ssl-ciphers",
            "ssl-keyfile",
            "tokens-only",
            "tool-call-parser",
            "tool-parser-plugin",
            "tool-server",
            "tool-strict-level",
            "trust-request-chat-template",
            "uds",
            "uvicorn-log-level",
        ),
        _NO_SERVER,
    ),
}


def why_not(argument: str) -> str | None:
    """Why a flag is refused, a clause; None: the engine may have it."""
    flag = argument.partition("=")[0].replace("_", "-")
    if not flag.startswith("--"):
        return next((why for short, why in _SHORT.items() if flag.startswith(short)), None)
    name = flag.removeprefix("--")
    if name in _LONG:
        return _LONG[name]
    # "--" alone ends the flags.
    return next((why for long, why in _LONG.items() if name and long.startswith(name)), None)
