"""The tag of the made-up trajectories that benchmarks store and score."""

from rollout.types.trajectory import EngineTag, LogprobSemantics


def bench_tag(engine: str = "scripted", tokenizer_fingerprint: str = "", weights_digest: str = "") -> EngineTag:
    return EngineTag(
        engine=engine,
        engine_version="1",
        replica=0,
        weights_dtype="float32",
        kv_dtype="float32",
        quantization="none",
        logprob_semantics=LogprobSemantics.PROCESSED,
        kv_across_versions="recompute",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        tokenizer_fingerprint=tokenizer_fingerprint,
        chat_template_digest="",
        weights_digest=weights_digest,
    )
