"""What is asked: prompts, and the position in their seeded order. Sources of prompts live in `rollout/environments`."""

from dataclasses import dataclass, field

from rollout.types.wire import wired


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    content: str


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy: either raw `text` or chat `messages` (exactly one of them)."""

    prompt_id: str
    """Stable name of the task; the same in every pass through the data."""
    pass_index: int
    """Which run through the data this is, from 0."""
    text: str | None = None
    messages: tuple[Message, ...] = ()
    answer: str | None = None
    """Reference answer for the reward, if the environment has one."""
    metadata: tuple[tuple[str, str], ...] = field(default=())
    """Further columns of the source row, as strings."""

    def __post_init__(self) -> None:
        if (self.text is None) == (not self.messages):
            raise ValueError(
                f"prompt {self.prompt_id}: got text={self.text!r} and {len(self.messages)} messages; give exactly one "
                "of text and messages"
            )
        if self.pass_index < 0:
            raise ValueError(f"prompt {self.prompt_id}: pass_index {self.pass_index} is negative; passes count from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCursor:
    """Position in a prompt source: `index` prompts of pass `pass_index` have been drawn."""

    pass_index: int = 0
    index: int = 0
