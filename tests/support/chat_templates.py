"""Chat templates in the shapes that models come with, and the control tokens they write."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.tiny_tokenizer import CHATML, CONTROL_TOKENS


@dataclass(frozen=True, slots=True)
class Chat:
    """A template with the control tokens of its model."""

    name: str
    source: str
    controls: tuple[str, ...]
    bos: str | None
    eos: str


CHATML_CHAT = Chat("chatml", CHATML, CONTROL_TOKENS, None, "<|im_end|>")
LLAMA3_CHAT = Chat(
    "llama-3",
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
    "<|eot_id|>",
)
MISTRAL_CHAT = Chat(
    "mistral",
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    "<s>",
    "</s>",
)
ROLE_TOKENS_CHAT = Chat(  # the name of a control token is put together from the role
    "phi-3",
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    None,
    "<|end|>",
)
GEMMA_CHAT = Chat(  # a system message goes to the head of the first turn; contents are trimmed
    "gemma-3",
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- if messages[0]['content'] is string -%}\n"
    "        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n    {%- else -%}\n"
    "        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}\n    {%- endif -%}\n"
    "    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n    {%- set first_user_prefix = '' -%}\n"
    "    {%- set loop_messages = messages -%}\n{%- endif -%}\n{%- for message in loop_messages -%}\n"
    "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
    "        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\n"
    "    {%- endif -%}\n    {%- if (message['role'] == 'assistant') -%}\n        {%- set role = 'model' -%}\n"
    "    {%- else -%}\n        {%- set role = message['role'] -%}\n    {%- endif -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n    {%- else -%}\n"
    "        {{ raise_exception('Invalid content type') }}\n    {%- endif -%}\n    {{ '<end_of_turn>\n' }}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt -%}\n    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n",
    ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
    "<end_of_turn>",
)
TOOLS_CHAT = Chat(  # reads names, tools and arguments, and looks into contents
    "tools",
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}"
    "{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' ~ message.role }}"
    "{% if message.name %}{{ ' name=' ~ message.name }}{% endif %}{{ '\\n' }}"
    "{% if message.content is string %}{% if '</think>' in message.content %}"
    "{{ message.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ message.content }}{% endif %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '\\n<tool_call>' }}{{ {'name': call.function.name, 'arguments':"
    " call.function.arguments} | tojson }}{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    CONTROL_TOKENS,
    None,
    "<|im_end|>",
)
CHATS = (CHATML_CHAT, LLAMA3_CHAT, MISTRAL_CHAT, ROLE_TOKENS_CHAT, GEMMA_CHAT, TOOLS_CHAT)
