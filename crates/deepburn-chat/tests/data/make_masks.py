"""Records the masks of `transformers` 5.23 for small conversations: python make_masks.py GPT2 MISTRAL > masks.json

GPT2 and MISTRAL are folders with a tokenizer of GPT-2, and one of Mistral, which writes spaces as a character and unknown
characters as bytes. The first one is also used with ranges without spaces, as tokenizers of RoBERTa have them."""

import json
import sys

from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

PLAIN = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
SPACED = PLAIN.replace("{{ m.content }}{% endgen", "{{ m.content + ' ' }}{% endgen")
LINES = PLAIN.replace("{% endfor %}", "{{ '\n' }}{% endfor %}")

CASES = [
    ("an answer that ends in a character with several tokens", PLAIN, ["Hi? ", "Well 🙂", " ok"]),
    ("an answer that is a character with several tokens", LINES, ["Hi?", "🙂", "More?", "x"]),
    ("an answer that begins with a space", LINES, ["Hi?", " Hello", "More?", "Yes"]),
    ("an answer that ends with a space", SPACED, ["Hi?", "Hello", "More?", "Yes"]),
    ("answers within tokens", PLAIN, ["Hel", "lo wor", "ld of", " all"]),
    ("an empty answer between tokens", LINES, ["Hi?", "", "More?", "Yes"]),
    ("an empty answer within a token", PLAIN, ["Hel", "", "lo", " there"]),
    ("an empty answer at the end", PLAIN, ["Hello", ""]),
    ("a first answer of one token", PLAIN, [None, "A", " question?", " Yes"]),
    ("an empty first answer", PLAIN, [None, "", "Hello", " Yes"]),
    ("an answer of spaces", LINES, ["Hi?", "   ", "More?", "Yes"]),
]

rows = []
for name, folder in (("GPT-2", sys.argv[1]), ("GPT-2 without spaces", sys.argv[1]), ("Mistral", sys.argv[2])):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name.endswith("spaces"):
        tokenizer.backend_tokenizer.post_processor = ByteLevel(add_prefix_space=False, trim_offsets=True)
    for case, template, contents in CASES:
        messages = [dict(role=("user", "assistant")[i % 2], content=it) for i, it in enumerate(contents) if it is not None]
        text, spans = render_jinja_template(conversations=[messages], chat_template=template, return_assistant_tokens_mask=True)
        encoded = tokenizer(text[0], add_special_tokens=False, return_offsets_mapping=True)
        row = dict(name=f"{name}: {case}", template=template, messages=messages, spans=spans[0], ids=encoded["input_ids"], offsets=encoded["offset_mapping"])
        try:
            masked = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            assert masked["input_ids"] == row["ids"]
            row["mask"] = "".join(map(str, masked["assistant_masks"]))
        except OverflowError:
            row["mask"] = None
        rows.append(row)
print("[\n" + ",\n".join(json.dumps(it, ensure_ascii=False) for it in rows) + "\n]")
