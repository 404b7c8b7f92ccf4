"""Writes the chat templates and their results that the tests of halcyon-text compare with.

Usage: python template_cases.py OUT.json

The results are those of jinja2 with the settings of Hugging Face's `transformers`. The templates are short versions
of the shapes that models use. Needs jinja2.
"""

import datetime
import json
import sys
from pathlib import Path

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1795824000 + 3600 * 15 + 62

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<\uff5cUser\uff5c>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls'] %}{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + tool['type'] + '<\uff5ctool\u2581sep\uff5c>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments']|tojson + '\\n' + '```' }}{%- endfor %}{%- elif message['role'] == 'assistant' %}{%- set content = message['content'] %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}{{ '<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{%- endif %}{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{ '\\n<tool>' + message['content'] + '</tool>' }}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""

HARMONY = """{%- macro render_type(spec, required=[]) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}{{- render_type(spec['items']) + "[]" }}{%- else -%}{{- "any[]" }}{%- endif -%}
    {%- elif spec.enum is defined and spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, prop in spec.properties.items() -%}
            {{- "  " + name }}
            {%- if name not in (required or []) -%}{{- "?" }}{%- endif -%}
            {{- ": " + render_type(prop, prop.required or []) }}
            {%- if prop.default is defined %}{{- ", // default: " + prop.default|string }}{%- endif %}
            {{- "\\n" if not loop.last else "" }}
        {%- endfor -%}
        {{- "\\n}" }}
    {%- elif spec.type == "integer" or spec.type == "number" -%}
        {{- "number" }}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + "<|end|>" }}
{%- if tools %}
    {{- "<|start|>developer<|message|>namespace functions {\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: " + render_type(tool.parameters, tool.parameters.required) + ") => any;\\n" }}
    {%- endfor %}
    {{- "}<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.tool_calls -%}
            {%- set tool_call = message.tool_calls[0].function %}
            {%- if message.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" + tool_call.arguments|tojson + "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""

PHI = """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|system|>' + '\\n' + message['content'] + '<|end|>' + '\\n'}}{% elif (message['role'] == 'user') %}{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n'}}{% elif message['role'] == 'assistant' %}{% generation %}{{'<|assistant|>' + '\\n' + (message['content'] or '') + '<|end|>' + '\\n'}}{%- endgeneration %}{% else %}{% continue %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PYTHON = """{%- set text = messages[-1].content %}
{%- if text is not string %}{% set text = 'none' %}{% endif %}
[{{ text.strip() }}|{{ text.lstrip('x ') }}|{{ text.rstrip() }}|{{ text.upper() }}|{{ text.lower() }}|{{ text.title() }}]
[{{ text.split() }}|{{ text.split('a', 1) }}|{{ text.replace('a', '<A>') }}|{{ text.find('a') }}|{{ text.startswith('x') }}]
{% for key in {'b': 1, 'a': [1.5, none, true, 'q']}.keys() %}{{ key }}{% if loop.index0 == 1 %}{% break %}{% endif %}, {% endfor %}

{{ {'b': 1.0, 'a': [none, false, "it's", 'é"'], 'c': {}} }} {{ {'b': 1, 'é': '<&>'} | tojson }} {{ [1, 'a', {'k': [] }] | tojson(indent=2) }}
{{ {'a': 1}.get('b', 'default') }} {{ {'a': 1}.get('a') }} {{ none }} {{ true }} {{ 10 // 3 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ 'a' ~ 1 ~ none ~ true }}
{{ messages | map(attribute='role') | join(',') }} {{ messages | length }} {{ (messages | first).role }} {{ range(3) | list }} {{ [3, 1, 2] | sort }}
{{ undefined_thing }}|{{ undefined_thing is defined }}|{{ messages[0].nothing is defined }}|{{ messages[0].nothing or 'x' }}
{{ documents | default('no documents', true) }} {{ "%s-%d" | format('a', 3) }} {{ 'abc'[::-1] }} {{ 'abc'[1:] }} {{ [1, 2, 3][-2:] }}
{{ {'z': 1, 'y': 2} | dictsort }} {{ {'z': 1, 'y': 2} | items | list }} {{ 'a b' | replace(' ', '_') | capitalize }} {{ ' x '|trim|length }} {{ 'x\\ny' | indent(2) }}
{#- a comment -#}
    {%+ if true %} kept{% endif %}

{{ '{}-{}'.format(1, 'b') }} {{ 3.0 }} {{ 1e20 }} {{ 0.1 + 0.2 }} {{ 5 % 3 }} {{ -7 // 2 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'a' in 'cat' }} {{ 1 if false }}|
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen3": QWEN3, "mistral": MISTRAL,
             "deepseek": DEEPSEEK, "harmony": HARMONY, "phi": PHI, "python": PYTHON}

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a place", "parameters": {
        "type": "object", "properties": {
            "place": {"type": "string", "description": "A city, e.g. \u00c5rhus"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "days": {"type": "array", "items": {"type": "integer"}}, "exact": {"type": "boolean", "default": True}},
        "required": ["place"]}}},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string", "default": "U\"TC"}}, "required": []}}},
]
USER = {"role": "user", "content": " Hi there, ask me a thing! "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "Sure: 1 < 2 & \"x\"\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {
    "name": "get_weather", "arguments": {"place": "\u6771\u4eac", "days": [1, 2], "exact": False, "x": 1.0, "n": None}}}]}
RESULT = {"role": "tool", "content": "{\"t\": 21}", "tool_call_id": "abcdefghi", "name": "get_weather"}
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "end": [USER, ANSWER],
    "thought": [USER, THOUGHT, {"role": "user", "content": "xa axa  Why?\tSo\u00e4?"}, THOUGHT],
    "reasoning": [USER, {**CALL, "reasoning_content": "\nI must call.\n", "reasoning": "\nI must call.\n", "thinking": "\nI must call.\n"}, RESULT],
    "tools": [SYSTEM, USER, CALL, RESULT, ANSWER, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " Look "}, {"type": "image"}]}],
    "wrong": [USER, USER],
    "nothing": [{"role": "assistant", "content": None}],
}
OPTIONS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False, "tools": TOOLS, "date_string": "1 May 2025"},
    {"add_generation_prompt": True, "tools": TOOLS[1:], "enable_thinking": False, "reasoning_effort": "low"},
]


class Generation(Extension):
    """The tag that marks what a model wrote, without effect."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(text):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(text)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def main():
    env, cases = environment(), []
    for name, source in TEMPLATES.items():
        template = env.from_string(source)
        for chat, messages in CHATS.items():
            for i, options in enumerate(OPTIONS):
                values = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>", **options}
                try:
                    result = {"text": template.render(messages=messages, **values)}
                except jinja2.exceptions.TemplateError as e:
                    # Only the texts of templates are compared; those of jinja2 are its own.
                    result = {"error": str(e) if type(e) is jinja2.exceptions.TemplateError else ""}
                except TypeError:
                    result = {"error": ""}
                cases.append({"template": name, "chat": chat, "options": i, **result})
    out = {"now": NOW, "templates": TEMPLATES, "chats": CHATS, "options": OPTIONS}
    head = json.dumps(out, ensure_ascii=False, separators=(",", ":"))[:-1]
    lines = ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in cases)
    path = Path(sys.argv[1])
    path.write_text(f"{head},\n\"cases\":[\n{lines}]}}\n")
    print(len(cases), "cases,", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
