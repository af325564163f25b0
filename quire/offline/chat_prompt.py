"""A conversation as a prompt, by the server's rules: roles, tools and text come out the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import BadRequest
from quire.text.tokenizer import Tokenizer
from quire.text.tools.definitions import Tool, check_tools
from quire.text.tools.prompt import template_inputs

Message = Mapping[str, Any]

# Arguments of `Tokenizer.apply_chat_template` and `LLM.chat`; no variables of a template.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "messages",
        "self",
        "tokenize",
        "tools",
    }
)


def check_content_format(wanted: str) -> None:
    """How contents reach the template, as vLLM's argument of that name says."""
    if wanted not in ("auto", "string"):
        raise BadRequest(
            f"got chat_template_content_format={wanted!r}, want 'auto' or 'string': templates get"
            " the text of a message as one string",
            param="chat_template_content_format",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStyle:
    """How conversations are written down."""

    tools: Sequence[Tool] = ()
    template: str | None = None  # None: the model's own
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any]

    @staticmethod
    def of(
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatStyle:
        """Checked as a caller gave it; raises BadRequest."""
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message needs add_generation_prompt=False",
                param="continue_final_message",
            )
        if taken := RESERVED & (variables or {}).keys():
            raise BadRequest(
                f"got chat_template_kwargs with {sorted(taken)}, which are arguments of their own",
                param="chat_template_kwargs",
            )
        return ChatStyle(
            tools=check_tools(tools),
            template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables or {},
        )

    def prompt(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> dict[str, Any]:
        """Raises BadRequest naming the message at fault."""
        template = self.template if self.template is not None else tokenizer.chat_template
        checked, definitions = template_inputs(messages, self.tools, template)
        text = tokenizer.apply_chat_template(
            checked,
            tools=definitions,
            add_generation_prompt=self.add_generation_prompt,
            tokenize=False,
            continue_final_message=self.continue_final_message,
            chat_template=self.template,
            **self.variables,
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}
