"""Chats as transformers renders them, and what is said of templates and messages that do not serve."""

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from small_checkpoints import QWEN3, tensors_of, write
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from codec_jax.nnx import open_checkpoint
from codec_jax.nnx.chat import ChatTemplate

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
QWEN3_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
CHATML = """{% for message in messages %}
{% if message['role'] == 'ignored' %}
    {% continue %}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
    {% generation %}
    {% set text = message['content'] if message['content'] is string else message['content'] | tojson(sort_keys=true) %}
{{ text }}<|im_end|>
    {% endgeneration %}
{% endfor %}
{% if documents is not none %}{{ documents | tojson(separators=(',', ':')) }}{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant{{ unknown_token }}
{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
TEMPLATES = {"Llama 3": LLAMA3, "Qwen3": QWEN3_TEMPLATE, "ChatML": CHATML, "Mistral": MISTRAL}

SYSTEM = {"role": "system", "content": "  Answer <b>briefly</b>. "}
USER = {"role": "user", "content": "How warm is it in Zürich & 東京? 🌡️"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n21 °C"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "high": 1.5}}}],
}
RESULT = {"role": "tool", "content": '{"°C": 21}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "<é>"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather's state <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER, ANSWER],
    "tool": [SYSTEM, USER, CALL, RESULT],
    "two calls": [USER, {**CALL, "tool_calls": 2 * CALL["tool_calls"]}],
    "parts": [PARTS],
    "ignored": [{"role": "ignored", "content": ""}, USER],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "tools": {"tools": [TOOL]},
    "no prompt": {"add_generation_prompt": False},
    "no thinking": {"enable_thinking": False},
    "thinking": {"enable_thinking": True, "tools": []},
    "other names": {"date_string": "1 May", "documents": [{"title": "é", "text": "<x>"}], "bos_token": "<other>"},
}


def tokenizer_of(words: list[str]) -> Tokenizer:
    """One that adds <s> in front of every text, unless it is told not to."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "<s>", *words])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


# --- Against transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_read_as_in_transformers_or_are_refused_in_the_same_words(name: str, chat: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which one Python has")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of([]), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[name]
    )
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for options in OPTIONS.values():
        given, refusal = {"add_generation_prompt": True, **options}, None
        try:
            want = theirs.apply_chat_template(CHATS[chat], tokenize=False, **given)
        except (TypeError, jinja2.TemplateError) as error:
            refusal = f"messages: expected a chat that the template takes, got its error: {error}"
        if refusal is None:
            assert ours.render(CHATS[chat], **options) == want
        else:
            with pytest.raises(ValueError, match=f"^{re.escape(refusal)}$"):
                ours.render(CHATS[chat], **options)


def test_a_checkpoint_of_transformers_has_its_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which one Python has")
    checkpoint = write(tmp_path / "one", QWEN3, tensors_of(QWEN3))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"),
        bos_token="w1",
        eos_token=AddedToken("w5", special=True),
        chat_template=MISTRAL,
    )
    theirs.save_pretrained(checkpoint)
    assert (checkpoint / "chat_template.jinja").exists()
    ours = open_checkpoint(checkpoint)
    chat = CHATS["turns"]
    assert ours.chat_template is not None
    assert ours.chat_template.render(chat) == theirs.apply_chat_template(chat, tokenize=False)
    words = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    want = theirs.apply_chat_template(words, tokenize=True, return_dict=False)
    assert ours.chat_template.encode(ours.tokenizer, words) == want


# --- Tokens -----------------------------------------------------------------------------------------------------


def test_a_chat_has_the_special_tokens_of_its_template_and_no_others() -> None:
    tokenizer = tokenizer_of(["[INST]", "hello", "[/INST]"])
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>"})
    assert tokenizer.encode("hello").ids == [1, 3]
    assert template.encode(tokenizer, [{"role": "user", "content": "hello"}]) == [1, 2, 3, 4]


def test_of_several_templates_the_one_for_tools_goes_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "1 tools"
    assert ChatTemplate({"default": "{{ tools | length }}", "rag": ""}).render([USER], tools=[TOOL]) == "1"


# --- Checkpoints ------------------------------------------------------------------------------------------------


def checkpoint_with(directory: Path, template: Any = None, jinja: bytes | None = None, **settings: Any) -> Path:
    write(directory, QWEN3, tensors_of(QWEN3))
    given = {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **given}))
    if jinja is not None:
        (directory / "chat_template.jinja").write_bytes(jinja)
    return directory


def test_a_checkpoint_has_no_template_or_that_of_its_files(tmp_path: Path) -> None:
    bare = open_checkpoint(write(tmp_path, QWEN3, tensors_of(QWEN3)))
    assert bare.chat_template is None
    assert open_checkpoint(checkpoint_with(tmp_path)).chat_template is None
    tokens = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": None}
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ add_bos_token }}"
    one = open_checkpoint(checkpoint_with(tmp_path, text, **tokens, add_bos_token=True))
    assert one.files == bare.files | {tmp_path / "tokenizer_config.json"}
    assert one.chat_template is not None
    assert one.chat_template.render([USER]) == "<s></s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    several = open_checkpoint(checkpoint_with(tmp_path, named)).chat_template
    assert several is not None
    assert (several.render([USER]), several.render([USER], tools=[TOOL])) == ("plain", "tools")
    file = open_checkpoint(checkpoint_with(tmp_path, named, "é{{ bos_token }}".encode(), **tokens))
    assert file.files == one.files | {tmp_path / "chat_template.jinja"}
    assert file.chat_template is not None
    assert file.chat_template.render([USER], tools=[TOOL]) == "é<s>"


@pytest.mark.parametrize(
    ("template", "jinja", "problem"),
    [
        (5, None, "tokenizer_config.json: expected a template, or a list of .* as chat_template, got 5"),
        ([{"name": "x"}], None, r'tokenizer_config.json: expected a template, or a list .*, got \[\{"name": "x"\}\]'),
        ([{"name": "default", "template": 1}], None, "tokenizer_config.json: expected a template, or a list of .*"),
        (["x"], None, r"tokenizer_config.json: expected a template, or a list of .*, got \[\"x\"\]"),
        ([], None, 'tokenizer_config.json: template: expected one by the name of "default", got none'),
        (
            "one\n{% if %}",
            None,
            "tokenizer_config.json: template: expected jinja, got an error in line 2: Expected an expression, got .*",
        ),
        (
            "fine",
            b"{{ 1 | unknown }}",
            "chat_template.jinja: template: expected jinja, got an error in line 1: No filter named 'unknown'.",
        ),
        ("fine", b"{% if 1 %}" * 200 + b"{% endif %}" * 200, "chat_template.jinja: template: expected jinja, got .*"),
        ("fine", b"\xff", "chat_template.jinja: expected a text file, got 'utf-8' codec can't decode byte 0xff .*"),
    ],
)
def test_a_checkpoint_with_a_bad_template_is_refused(
    tmp_path: Path, template: Any, jinja: bytes | None, problem: str
) -> None:
    directory = checkpoint_with(tmp_path, template, jinja)
    with pytest.raises(ValueError, match=rf"that the decoder can run, but\n  {problem}$"):
        open_checkpoint(directory)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    (checkpoint_with(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"\n  tokenizer_config.json: expected a JSON file, got .*$"):
        open_checkpoint(tmp_path)


# --- What is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ 1 + 'a' }}",
        "{{ missing.key }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_can_neither_change_messages_nor_reach_beyond_them(source: str) -> None:
    with pytest.raises(ValueError, match=r"^messages: expected a chat that the template takes, got its error: "):
        ChatTemplate(source).render([dict(USER)])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], r"messages: expected a list of at least one message, got \[\]"),
        ("hello", "messages: expected a list of at least one message, got 'hello'"),
        (USER, "messages: expected a list of at least one message, got {'role'"),
        ([USER, ANSWER, "hello"], r'messages\[2\]: expected an object with "role" and "content", .*, got \'hello\''),
        ([USER, {"role": "user"}], r'messages\[1\]: expected an object with "role" and "content"'),
        ([{"content": "hello"}], r'messages\[0\]: expected an object with "role" and "content"'),
        ([{"role": "user", "content": None}], r"messages\[0\]: expected an object"),
        ([{"role": "user", "content": 5}], r"messages\[0\]: expected an object"),
        ([{"role": "user", "content": ["hello"]}], r"messages\[0\]: expected an object"),
        ([{"role": 1, "content": "hello"}], r"messages\[0\]: expected an object"),
    ],
)
def test_messages_of_another_shape_are_named(messages: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        ChatTemplate(CHATML).render(messages)


def test_tools_and_tokenizers_of_another_kind_are_named() -> None:
    with pytest.raises(ValueError, match=r"^tools: expected a list of objects, the JSON schemas of functions, got <"):
        ChatTemplate(CHATML).render([USER], tools=max)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^tokenizer: expected a Tokenizer, got str"):
        ChatTemplate(CHATML).encode("words", [USER])  # type: ignore[arg-type]
