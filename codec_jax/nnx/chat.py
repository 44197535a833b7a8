"""Chats as text, by the jinja template that a checkpoint brings along.

Templates are programs by others, so they run in jinja's sandbox. They find there what transformers gives to them:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from codec_jax import checks
from codec_jax.nnx.checkpoint_config import shown
from codec_jax.nnx.text import token_ids

#: Of several templates, the one for chats with tools, and the one for all others.
_WITH_TOOLS, _DEFAULT = "tool_use", "default"


class ChatTemplate:
    r"""Renders the messages of a chat as the model was trained to read them. `Checkpoint.chat_template` is one.

    >>> from codec_jax.nnx import ChatTemplate
    >>> template = ChatTemplate(
    ...     "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    ...     "{% if add_generation_prompt %}<assistant>{% endif %}"
    ... )
    >>> template.render([{"role": "user", "content": "How tall is K2?"}])
    '<user>How tall is K2?\n<assistant>'
    >>> tokenizer = open_checkpoint("Qwen3-4B").tokenizer
    >>> tokens = template.encode(tokenizer, [{"role": "user", "content": "How tall is K2?"}])
    """

    def __init__(self, template: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template.

        Args:
          template: in jinja; or several by name, "default" and perhaps "tool_use", which is for chats with tools.
          special_tokens: names that templates have for special tokens, such as bos_token, and their texts.

        Raises ValueError for a template that is no jinja, or several without "default".
        """
        self.special_tokens = dict(special_tokens or {})
        named = {_DEFAULT: template} if isinstance(template, str) else template
        if _DEFAULT not in named:
            raise ValueError(f'template: expected one by the name of "default", got {", ".join(named) or "none"}')
        self._templates = {name: _compile(source) for name, source in named.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Return the chat as text, with the special tokens in it: to encode it, `encode` adds no others.

        Args:
          messages: objects with "role" and "content", or "tool_calls" instead. None is as if a key were not there.
          tools: JSON schemas of the functions that the model may call.
          add_generation_prompt: end with what comes before an answer.
          extra: further names that the template knows, such as Qwen3's enable_thinking.

        Raises ValueError for messages or tools of another shape, or if the template refuses them or fails.
        """
        given = _checked(messages)
        if tools is not None and not _all_objects(tools):
            raise ValueError(f"tools: expected a list of objects, the JSON schemas of functions, got {tools!r}")
        name = _WITH_TOOLS if tools is not None and _WITH_TOOLS in self._templates else _DEFAULT
        names = {"documents": None, **self.special_tokens, **extra}
        names |= {"messages": given, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._templates[name].render(names)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"messages: expected a chat that the template takes, got its error: {error}") from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Return the chat as token ids, for `Sampler.generate`.

        Args:
          tokenizer: as `Checkpoint.tokenizer`.
          messages, tools, add_generation_prompt, extra: as in `render`.

        Raises TypeError for another tokenizer, and what `render` raises.
        """
        checks.instance("tokenizer", tokenizer, Tokenizer)
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)
        return token_ids("messages", text, tokenizer, special=False)


def read_chat_template(file: Path, tokenizer_config: Mapping[str, Any], problems: list[str]) -> ChatTemplate | None:
    """Read chat_template.jinja, or else what tokenizer_config.json has; None without, or if it is added to problems."""
    name, template = "tokenizer_config.json", tokenizer_config.get("chat_template")
    try:
        if file.exists():
            name = file.name
            template = file.read_text("utf-8")
        if isinstance(template, list):
            template = {one["name"]: one["template"] for one in template}
        if template is None:
            return None
        if not all(isinstance(one, str) for one in (template.values() if isinstance(template, dict) else [template])):
            raise TypeError
        return ChatTemplate(template, _special_tokens(tokenizer_config))
    except (KeyError, TypeError):
        given = shown(tokenizer_config["chat_template"])
        problems.append(f"{name}: expected a template, or a list of those with names, as chat_template, got {given}")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{name}: expected a text file, got {error}")
    except ValueError as error:
        problems.append(f"{name}: {error}")
    return None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of bos_token and the like, which are strings or objects that describe a token."""
    tokens = {name: value for name, value in tokenizer_config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _all_objects(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, Mapping) for value in values)


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Return messages without what is None, for templates would write "None", or raise ValueError."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages: expected a list of at least one message, got {repr(messages)[:1000]}")
    given = []
    for i, message in enumerate(messages):
        own = {key: value for key, value in message.items() if value is not None} if _all_objects([message]) else {}
        content = own.get("content", [] if "tool_calls" in own else None)
        if not isinstance(own.get("role"), str) or not (isinstance(content, str) or _all_objects(content)):
            raise ValueError(
                f'messages[{i}]: expected an object with "role" and "content", a string or a list of parts, '
                f"got {repr(message)[:1000]}"
            )
        given.append(own)
    return given


# ---------------------------------------------------------------------- jinja


class _Generation(Extension):
    """Marks what the model writes, for those who train it; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012, as jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
    try:
        return environment.from_string(source)
    except Exception as error:  # jinja's own has a line; Python raises others for what is nested too deeply
        where = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reason = str(error).partition("\n")[0]
        raise ValueError(f"template: expected jinja, got an error{where}: {reason}") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON without the escapes that jinja's own filter has for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
