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
