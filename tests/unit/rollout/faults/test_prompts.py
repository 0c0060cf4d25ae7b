"""Planted faults at the seam where prompts become tokens: each changes what text becomes, and leaves the rest."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import build_dispatch, build_prompt
from support.episode_fakes import TOKENIZER, ids

from rollout.environments.single_turn import prompt_tokens
from rollout.errors import UserError
from rollout.faults.config import DoubleBosFault, FaultsConfig, PromptFault, TemplateSpaceFault, TokenizerSwapFault
from rollout.faults.prompts import ChangedTokenizer, PlantedPrompts, plant_tokenizer
from rollout.types.prompts import Message
from rollout.types.weights import PolicyVersion


class Chatty(ChangedTokenizer):
    """Begins every text with 9, and joins messages."""

    @property
    def bos_id(self) -> int | None:
        return 9

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.concatenate([ids(9), self.inner.encode(text)])

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        return self.inner.encode("".join(message.content for message in messages))


def test_prompt_faults_change_what_text_becomes_and_leave_the_rest():
    plain = TOKENIZER.encode("12+3=").tolist()
    one, two, unknown = *TOKENIZER.encode("12").tolist(), *TOKENIZER.encode(" ").tolist()
    wanted: list[tuple[TokenizerSwapFault | TemplateSpaceFault | DoubleBosFault, list[int]]] = [
        (TokenizerSwapFault(), [two, one, *plain[2:]]),
        (TemplateSpaceFault(), [*plain, unknown]),
        (DoubleBosFault(), [one, *plain]),
    ]
    chat = (Message(role="user", content="12"), Message(role="user", content="+3="))
    for fault, expected in wanted:
        tokenizer = plant_tokenizer(TOKENIZER, [fault])
        assert tokenizer.encode("12+3=").tolist() == expected
        assert plant_tokenizer(Chatty(TOKENIZER), [fault]).render_chat(chat).tolist() == expected
        assert tokenizer.decode(ids(*plain)) == "12+3=" and tokenizer.fingerprint() == TOKENIZER.fingerprint()
        assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == (
            TOKENIZER.eos_ids,
            TOKENIZER.bos_id,
            TOKENIZER.vocab_size,
        )


def test_a_doubled_begin_token_is_refused_before_it_is_sent():
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        prompt_tokens(build_prompt(), plant_tokenizer(Chatty(TOKENIZER), [DoubleBosFault()]), apply_chat_template=False)


def test_replica_version_and_rate_choose_the_dispatches_whose_prompts_go_wrong():
    def tokenizer(version: int, replica: int, fault: PromptFault) -> object:
        prompts = PlantedPrompts(TOKENIZER, FaultsConfig(plant=(fault,)))
        dispatch = build_dispatch(policy=PolicyVersion(1, version))
        prompts.note([dispatch])
        chosen = prompts.tokenizer_for(dispatch.prompt)
        assert prompts.tokenizer_for(dispatch.prompt) is TOKENIZER  # forgotten
        assert dispatch.replica == 0 and fault.replica == replica
        return chosen

    assert tokenizer(0, 0, TemplateSpaceFault()) is TOKENIZER
    assert tokenizer(1, 0, TemplateSpaceFault()) is not TOKENIZER
    assert tokenizer(1, 1, TemplateSpaceFault(replica=1)) is TOKENIZER
    assert tokenizer(1, 0, TemplateSpaceFault(rate=1e-9)) is TOKENIZER


def test_a_swap_of_texts_that_are_no_two_tokens_is_refused():
    with pytest.raises(UserError, match="two different tokens"):
        PlantedPrompts(TOKENIZER, FaultsConfig(plant=(TokenizerSwapFault(first="1", second="31"),)))
