"""Environments of one turn: the policy answers a prompt once. How a prompt becomes tokens is decided here, and nowhere
else."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.prompts import Message, Prompt


@dataclass(frozen=True, slots=True, eq=False)
class SingleTurnEnv:
    """Shows its prompt and says nothing more."""

    name: str
    ids: NDArray[np.int32]
    """[P], read-only."""

    def prompt_ids(self) -> NDArray[np.int32]:
        return self.ids

    async def reply(self, sampled_ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        return None


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer, apply_chat_template: bool) -> NDArray[np.int32]:
    """[P] ids of a prompt, read-only.

    Messages go through the chat template. A raw prompt becomes one user message where the tokenizer has a template and
    `apply_chat_template` is set; else it is encoded as it is.

    Raises:
        UserError: messages without a chat template, a prompt without tokens, or two beginning-of-sequence tokens in
            front.
    """
    if prompt.text is None:
        ids = tokenizer.render_chat(prompt.messages)
    elif apply_chat_template and tokenizer.has_chat_template:
        ids = tokenizer.render_chat((Message(role="user", content=prompt.text),))
    else:
        ids = tokenizer.encode(prompt.text)
    if ids.size == 0:
        raise UserError(f"prompt {prompt.prompt_id} has no tokens; expected at least one")
    if tokenizer.bos_id is not None and ids.size > 1 and ids[0] == ids[1] == tokenizer.bos_id:
        doubled = f"prompt {prompt.prompt_id} starts with two beginning-of-sequence tokens ({tokenizer.bos_id})"
        raise UserError(f"{doubled}; take the written one out of the prompt or the template")
    ids.setflags(write=False)
    return ids
