"""Faults of evaluations: wrappers round an evaluator."""

from collections.abc import Callable

from rollout.evaluation.evaluator import Evaluates, EvaluationReport
from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import EvaluationTemplateFault
from rollout.faults.prompts import ChangedTokenizer
from rollout.published.digests import json_digest
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.prompts import Message
from rollout.types.protocols import Engine
from rollout.types.trajectory import EngineTag
from rollout.types.weights import PolicyVersion


class OtherTemplate(ChangedTokenizer):
    """Every prompt begins with its own first character once more, a conversation with an empty system message; a
    template that does so has another digest."""

    def __init__(self, inner: Tokenizer) -> None:
        empty = Message(role="system", content="")
        super().__init__(inner, text=lambda text: text[:1] + text, chat=lambda messages: (empty, *messages))

    def chat_template_digest(self) -> str:
        return json_digest([self.inner.chat_template_digest(), "changed"])


class ChangedTemplateEvaluator:
    """Implements `Evaluates`: one evaluator before the fault, another from it on."""

    def __init__(self, before: Evaluates, changed: Evaluates, fault: EvaluationTemplateFault) -> None:
        self._before, self._changed, self._fault = before, changed, fault

    def connect(self, slot: int, engine: Engine, tag: EngineTag) -> None:
        self._before.connect(slot, engine, tag)
        self._changed.connect(slot, engine, tag)

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        chosen = self._changed if policy.version >= self._fault.start_version else self._before
        return await chosen.evaluate(slot, policy, label)


def plant_evaluator(build: Callable[[Tokenizer], Evaluates], tokenizer: Tokenizer, faults: FaultsConfig) -> Evaluates:
    """The evaluator that `build` makes of a tokenizer, with the faults planted on evaluations; without any, as it
    is."""
    evaluator = build(tokenizer)
    for fault in faults.plant:
        if isinstance(fault, EvaluationTemplateFault):
            evaluator = ChangedTemplateEvaluator(evaluator, build(OtherTemplate(tokenizer)), fault)
    return evaluator
