"""Renders templates with transformers' Jinja environment, and writes renders.json: [[template, variables, text or null]].

Usage: python make_renders.py (transformers 5.23, jinja2 3.1.6). The clock stands at 2026-07-04 09:08:07.
"""

import datetime
import json
import os

import transformers.utils.chat_template_utils as utils

NOW = datetime.datetime(2026, 7, 4, 9, 8, 7)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


utils.datetime = Clock
VARIABLES = {
    "s": " ab c ", "e": "", "u": "é日🙂", "n": None, "t": True, "i": 3, "f": 1.5, "big": 1e20, "tiny": 1e-7, "l": [1, "a", None, 2.0, True],
    "d": {"b": 1, "a": [1, {"x": "<&>'\""}], "z": None, "é": "ü\n\t\x01\u2028"}, "m": [{"role": "user", "content": "x"}, {"role": "assistant"}],
    "w": "\x1c\u00a0a\u3000\x1f", "line": "a\r\nb\n\nc",
}
# Printed with {{ }}.
EXPRESSIONS = """
n|t|not t|i|f|big|tiny|l|d|u|[1.0, 1e20, 'a\\'b', "q\\"r", none]|{'a': true}|(1,)|(1, 'x')|i / 2|4 / 2|i // 2|-7 // 2|-7 % 3|i ** 2|2 ** -1|i + f|0.1 + 0.2|1e16|1e15|123456789012345678
s + e|s ~ i ~ t ~ n|s * 2|l + [3]|'a' in s|'q' in d|'a' in d|n is none|x is defined|x is undefined|x is none|s is string|l is iterable|d is mapping|d is iterable|s is iterable|l is sequence|d is sequence|n is iterable|i is number|t is number|t is boolean|i is integer|f is float|i is odd|t is sameas true|n is sameas none|x
n == x|not x|x == ''|l[-1]|l[1:]|l[::-1]|s[1:3]|u[1]|u[::-1]|d.a|d['b']|d.q|d.q is defined|m[0].role|m[1].content|m[-1]['role']|n.a|x.a|d.a.b|l.a|l[9]|i.a
s | trim|w | trim|w.strip()|w.lstrip()|w.rstrip()|s.strip('a ')|s.split()|s.split(' ')|'a,b,c'.split(',', 1)|'a</t>b'.split('</t>')[-1]|s.upper()|s.title()|s.replace('a', 'b')|s.startswith(' a')|s.startswith(('x', ' '))|s.endswith('c ')|s.find('c')|s.count('a')|line.splitlines()|u.encode|'ab'.isdigit()|'12'.isdigit()|'a'.rjust(3)|'{}-{}'.format(1, 'a')|'%s' % i|'%s %d' % (s, 3)|'%s' | format(i)|'-'.join(['a', 'b'])|s.index('b')|'a b'.partition(' ')|'a b'.rpartition(' ')|'xxa'.removeprefix('x')|s.zfill(9)|'aXb'.lower()|s.capitalize()|'a'.center(5)
l | length|n | length|x | length|d | length|u | length|l | first|l | last|[] | first|[3, 1, 2] | sort|['b', 'A'] | sort|d | items | list|d.items() | list|d.keys() | list|d.values() | list|d.get('q', 7)|d.get('b')|d.get('q')|l | join('-')|[1.5, 1e20] | join|[none, true] | join(',')|l | map('string') | list|m | map(attribute='role') | list|m | selectattr('role', 'equalto', 'user') | list|m | rejectattr('content') | list|m | selectattr('content', 'defined') | list|[1, 2, 3] | select('odd') | list|[1, 2] | sum|[1, 2] | max|l | reverse | list|'abc' | reverse|d | dictsort|[1, 1, 2] | unique | list|'a\\nb' | indent(2)|'a' | upper|'aB c' | title|'aB' | capitalize|x | default('q')|n | default('q')|e | default('q')|e | default('q', true)|i | string|f | int|'12' | int|'x' | int(5)|f | round|3.14159 | round(2)|-3 | abs|'3.5' | float|i | float|'<a>' | e|'<a>' | escape|'<a>' | safe|range(3) | list|range(1, 7, 2) | list|l | batch(2) | list|'a-b' | replace('-', '+')|'a b' | wordcount|l | list|d | list|s | list|l | tojson|l | string
d | tojson|d | tojson(indent=2)|d | tojson(indent=0)|d | tojson(true)|d | tojson(ensure_ascii=True)|d | tojson(separators=(',', ':'))|d | tojson(sort_keys=true)|{'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1)|u | tojson|'\\u2028\\x7f"\\\\/' | tojson|[] | tojson(indent=2)|{} | tojson|big | tojson|tiny | tojson|1.0 | tojson|x | tojson|n | tojson|[x] | tojson|{1: 2, true: 3, none: 4} | tojson|(1, 2) | tojson|l[1:] | tojson|-0.0 | tojson|123456789012345678901234567890 | tojson|d | tojson(indent='--')
strftime_now('%d %B %Y')|strftime_now('%Y-%m-%d %H:%M:%S %j %a %A %b %p %I %y')|strftime_now('%-d %b')|dict(a=1).a|namespace(a=1).a|'a' if t else 'b'|('a' if n)|t and s|n or s|n and s|1 < 2 < 3|'a' < 'b'|[1, 2] == [1, 2]|{'a': 1} == {'a': 1.0}|1 == 1.0|1 == true|'1' == 1|n == false|[] or 'x'|{} or 'x'|0 or 'x'|i > n|i > 'a'|n + 1|n + 'a'|s + 1|l + 'a'|1 + t|'a' 'b'
line | indent|line | indent(2, true)|'a\\n \\n\\nb\\n' | indent|'a\\n\\nb' | indent(2, blank=true)|'a\\n\\nb\\n' | indent(width=1, first=true, blank=true)|'\\n' | indent(4)|'{\\n' | indent(4, first=true)|e | indent(4, first=true)|e | indent|'a\\n' | indent(width='--')|'a\\nb' | indent('é', true)|'a\\nb' | indent(-1, true)|'a\\n\\rb\\x0bc\\x1cd\\x85e\\u2028f' | indent(1)|i | indent|n | indent|'a\\nb' | indent(1.5)|'a' | indent(1, 2, 3, 4)
'abc def' | truncate(5)|'abc def ghi jkl' | truncate(9)|'abc def ghi jkl' | truncate(9, true)|'abc def ghi jkl' | truncate(11, false, '...', 0)|'abcdefghijkl' | truncate(5)|'ab cd' | truncate(3, leeway=0)|'aé bé cé' | truncate(5, end='', leeway=0)|'ab' | truncate(1)|'ab' | truncate(2, end='abc')|s | truncate|i | truncate|'abc def' | truncate(length=4, killwords=true, end='.', leeway=1)|' abc' | truncate(3, end='', leeway=0)
'a' | center(5)|'ab' | center(5)|'a' | center(4)|'ab' | center(4) ~ '.'|i | center(3)|e | center(2)|'abc' | center(2)|'a' | center | length|'é' | center(width=4)|'a' | center(-1)
'a b/c?d=é&~_-.' | urlencode|d | urlencode|i | urlencode|n | urlencode|t | urlencode|x | urlencode|{'a b': 'c/d e', 'f': 1} | urlencode|u | urlencode
'abc' | int|'42.9' | int|' -7 ' | int|'+3' | int|'1_000' | int|'1__0' | int|'_1' | int|e | int|'1e3' | int|'inf' | int|'nan' | int(2)|'0x1f' | int|'0x1f' | int(base=16)|'1.' | int|'.5' | int|'-' | int(default=9)|'12a' | int(n)|'-0.9' | int|'123456789012345678901234567890' | int|t | int|n | int|n | int(7)|'1 2' | int|'\\x1c5\\u3000' | int|'1e30' | int|'00012' | int|'x' | int('y')
'a-b-c'.rsplit('-', 1)|'a-b-c'.rsplit('-')|' a  b c '.rsplit()|' a  b c '.rsplit(none, 1)|' a  b c '.rsplit(maxsplit=1)|'a-b'.rsplit('-', maxsplit=0)|'a--b'.rsplit('--', -1)|''.rsplit()|''.rsplit('a')|'abc'.rsplit('')|'abc'.split('')|' a b'.rsplit(none, 0)|'aaa'.rsplit('aa')|' a b '.rsplit(' ')
'a b c'.partition(' ')|'a b c'.rpartition(' ')|'abc'.partition(' ')|'abc'.rpartition(' ')|'a b'.partition('')|'a<t>b'.partition('<t>')[2]|'éa'.index('a')|'aba'.rindex('a')|'a'.index('b')|'a'.index('')|l.index('a')|l.index('q')|m.index(m[1])|'xxa'.removeprefix('xx')|'a'.removeprefix('b')|'ab'.removesuffix('b')|'ab'.removesuffix('')|'ab'.removesuffix('a')
'ab'.center(5)|'ab'.center(5, '*')|'a'.center(4, '*')|'abc'.center(4, '*')|'a'.ljust(3) ~ '.'|'é'.ljust(3, 'é')|'ab'.rjust(5)|'a'.rjust(0)|'a'.rjust(3, 'ab')|'a'.rjust(-3)|'7'.zfill(3)|'-7'.zfill(4)|'+7'.zfill(4)|'--7'.zfill(5)|'-'.zfill(3)|''.zfill(2)|'abc'.zfill(2)|'-abc'.zfill(4)
'they\\'re 1st o_o aB-cD'.title()|'ΑΣ ΣΑΣ ΣΑΣ.Α'.title()|'éÀ ß'.title()|'a ßb'.title()|'ŉ'.title()|'aßé'.title()|'they\\'re bill\\'s' | title|'a\\rb\\x0bc\\u2028d\\r\\n'.splitlines()|'a\\rb\\x0bc\\u2028d\\r\\n'.splitlines(true)|'a\\n\\nb'.splitlines(keepends=true)|''.splitlines()|'\\n'.splitlines()
'\\U0001F600\\U00000041'|'\\a\\v\\/\\b\\f\\q'|'\\U00110000'|'\\U001'|'\\xg'|'\\\\U0001F600'|{'\\U0001F600': 1}|['\\U0001F600'][0] == u[-1]|'\\101\\0'|strftime_now('%f')|strftime_now('%H:%M:%S.%f')|strftime_now('%%f')
""".strip()
STATEMENTS = [
    "{% for x in n %}a{% endfor %}b", "{% for x in q %}a{% endfor %}b", "{% for x in [] %}a{% else %}b{% endfor %}", "{% for x in i %}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}", "{% for c in u %}{{ c }}.{% endfor %}",
    "{% for x in l if x %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% endfor %}", "{% for x in l %}{{ loop.previtem }}|{{ loop.nextitem }};{% endfor %}",
    "{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in [1,2,3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in [1,2] %}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{{ loop.depth }}{% endfor %}", "{% for x in [1,[2]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% for y in [1] %}{% set x = 2 %}{% endfor %}{{ x }}", "{% set ns = namespace(x=1) %}{% for y in [1] %}{% set ns.x = 2 %}{% endfor %}{{ ns.x }}",
    "{% if t %}{% set x = 2 %}{% endif %}{{ x }}", "{% set x %}  a {{ i }} {% endset %}[{{ x | trim }}]", "{% with x = 1 %}{{ x }}{% endwith %}{{ x }}",
    "{% macro a(b, c='d') %}{{ b }}{{ c }}{{ i }}{% endmacro %}{{ a(1) }}{{ a(2, c=3) }}", "{% macro a() %}{{ caller() }}{% endmacro %}{% call a() %}x{{ i }}{% endcall %}",
    "  {% if t %}\n  a\n  {% endif %}\n b\n", "a\n{%- if t %}\n  b{{ i }}\n{%- endif -%}\n\n c", "{%+ if t %}\n a\n{%+ endif %}", "a {#- c -#} b\n{# d #}\ne", "{{ 'a' }}\n{{- ' b' -}}\n c\n",
    "{% raw %}{{ x }}{% endraw %}{% filter upper %}a{{ u }}{% endfilter %}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set d2 = dict(d, q=1) %}{{ d2.q }}", "{{ raise_exception('no') }}",
    "{% generation %}a{% endgeneration %}", "{% set x = 0 %}{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "a\n  {% generation %}\n b\n  {% endgeneration %}\n c",
    "{% for y in [1,2] %}{% generation %}{{ loop.index }}{{ y }}{% endgeneration %}{% endfor %}", "{%- generation -%}  a  {%- endgeneration -%}  b", "{% do l.append(1) %}{{ l }}", "{{ l.append(1) }}{{ l }}",
    "{% set x = l.pop() %}{{ x }}", "{% set l.x = 1 %}", "{% if n[1:] %}a{% endif %}b", "{% for x in (1, 2) %}{{ x }}{% endfor %}", "{% for x in 1, 2 %}{{ x }}{% endfor %}", "{% import 'x' as y %}", "{% include 'x' %}",
    "{{ self }}", "{{ loop }}", "{{ messages }}", "{{ '\\n' }}{{ 'a\nb' }}", "{{ \"\\u00e9\\x41\\t\" }}", "{{ 'a\\'b' }}", "{%- set x = [] -%}{{ x is defined and not x }}", "{{ i if i is defined else j.k }}", "a\r\n{% if t %}\r\n b\r\n{% endif %}\rc\r\n", "{{ 'a\r\nb' }}{{ 'a\\r\\nb' }}",
    "{% raw %}\nx{% endraw %}", "a\n  {% raw %}\n  {{ x }}\n  {% endraw %}\nb", "a {%- raw -%} \n x \n {%- endraw -%} \n b", "{% raw %}{{ a == b }}{% if a[1:] %}{% endraw %}", "{%raw%}\n\n{%endraw%}\n\n", "{% raw -%}\n x{% endraw %}",
    "{{ 'a\\\nb' }}", "{%- set x = '\\U0001F600' -%}{{ x | length }}", "{% if '\\/' == '/' %}a{% else %}b{% endif %}", "{% for x in ['\\a'] %}{{ x }}{% endfor %}",
    "{{ ['\u00ad\u200b\u00a0\ufeff\ue000', 'a\u0301', '\U000e0001', 'it\\'s'] }}",
]


def render(source):
    try:
        return utils._compile_jinja_template(source).render(**VARIABLES)
    except Exception:
        return None


sources = list(STATEMENTS)
for line in EXPRESSIONS.split("\n"):
    # A filter has spaces around its bar.
    depth_free = line.replace(" | ", "\0").split("|")
    sources += ["{{ %s }}" % it.replace("\0", " | ") for it in depth_free]
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "renders.json")
rows = [[it, render(it)] for it in sources]
with open(path, "w", encoding="utf-8") as file:
    file.write('{"variables": %s,\n"renders": [\n' % json.dumps(VARIABLES))
    file.write(",\n".join(json.dumps(it) for it in rows) + "\n]}\n")
print(len(rows), "templates")
