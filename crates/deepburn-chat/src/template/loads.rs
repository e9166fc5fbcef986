//! The values that a tag loads, which are charged where the engine does not charge what it does
//! with them.
//!
//! The engine charges texts that an operation makes, and texts that a filter or a method is applied
//! to. It does not charge comparisons, subscripts, keys of dictionaries and arguments. A text on
//! the engine's stack is used once, so it is enough to charge the texts that a tag with such
//! operations loads from variables and attributes.

use super::expression::{Token, TokenKind, tokens};

/// The maximum bytes of a literal, or characters before an index, that are not charged.
const MAX_FREE: usize = 256;

/// The statements with the name of a template.
const TEMPLATE_STATEMENTS: [&str; 4] = ["extends", "from", "import", "include"];

/// Returns the body of a tag with `filter` applied to the values that it loads, or `None` if none
/// is charged. `is_output` tells whether the tag prints an expression.
pub(super) fn with_charged_loads(body: &str, is_output: bool, filter: &str) -> Option<String> {
    let tag = TagTokens::read(body, is_output)?;
    let is_charged = tag.is_charged();
    let mut insertions = Vec::new();
    for start in tag.start..tag.end {
        tag.charge(start, is_charged, filter, &mut insertions);
    }
    if insertions.is_empty() {
        return None;
    }
    // The sort is stable: insertions at the same position stay in order.
    insertions.sort_by_key(|(position, _)| *position);
    let (mut charged, mut from) = (String::new(), 0);
    for (position, text) in insertions {
        charged.extend([&body[from..position], &text]);
        from = position;
    }
    charged.push_str(&body[from..]);
    Some(charged)
}

/// A tag with its brackets.
struct TagTokens<'a> {
    tokens: Vec<Token<'a>>,
    brackets: Vec<Bracket>,
    /// Its expressions are in `start..end`.
    start: usize,
    end: usize,
}

/// What is known of a token's brackets.
#[derive(Clone, Copy, Default)]
struct Bracket {
    /// The token that closes this opening bracket.
    close: usize,
    /// The bracket around this token.
    parent: Option<usize>,
    /// Whether a comma is directly in this bracket.
    has_comma: bool,
    /// Whether a colon is directly in this bracket.
    has_colon: bool,
    /// Whether values in this bracket are arguments of a filter, or items of a list, tuple or
    /// dictionary.
    keeps_values: bool,
}

/// The last part of a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ValuePart {
    /// A variable, an attribute, an item, or a long literal.
    Load,
    /// A result, which the engine has charged.
    Call,
    /// An expression in brackets, whose loads are charged themselves.
    Group,
    /// A short literal.
    Literal,
}

impl<'a> TagTokens<'a> {
    fn read(body: &'a str, is_output: bool) -> Option<Self> {
        let tokens = tokens(body);
        let mut brackets =
            vec![Bracket { close: tokens.len(), ..Bracket::default() }; tokens.len()];
        let mut open = Vec::new();
        for (index, token) in tokens.iter().enumerate() {
            if token.kind == TokenKind::Close {
                open.pop().into_iter().for_each(|it: usize| brackets[it].close = index);
            }
            brackets[index].parent = open.last().copied();
            match (token.kind, open.last()) {
                (TokenKind::Open, _) => open.push(index),
                (_, Some(parent)) => {
                    brackets[*parent].has_comma |= token.text == ",";
                    brackets[*parent].has_colon |= token.text == ":";
                }
                _ => {}
            }
        }
        let mut tag = Self { start: 0, end: tokens.len(), tokens, brackets };
        if !is_output {
            (tag.start, tag.end) = tag.expressions()?;
        }
        for index in 0..tag.tokens.len() {
            let outer = tag.brackets[index].parent.is_some_and(|it| tag.brackets[it].keeps_values);
            tag.brackets[index].keeps_values = outer || tag.keeps_values(index);
        }
        Some(tag)
    }

    /// Returns where the expressions of a statement are.
    fn expressions(&self) -> Option<(usize, usize)> {
        let after = |is: &dyn Fn(&Token) -> bool| self.tokens.iter().position(is).map(|it| it + 1);
        let is_part = |(index, it): (usize, &Token)| {
            let words = ["as", "context", "ignore", "import", "missing", "with", "without"];
            index > 1 && it.depth == 0 && it.kind == TokenKind::Word && words.contains(&it.text)
        };
        let end = self.tokens.len();
        match self.tokens.first()?.text {
            "set" => {
                let is_start = |it: &Token| it.is_symbol("=") || it.is_symbol("|");
                Some((after(&is_start)?, end))
            }
            "for" => {
                let last = self.tokens.last()?;
                let is_recursive = last.is_word("recursive") && self.is_value(end.checked_sub(2)?);
                Some((after(&|it| it.is_word("in"))?, end - usize::from(is_recursive)))
            }
            it if TEMPLATE_STATEMENTS.contains(&it) => {
                Some((1, self.tokens.iter().enumerate().position(is_part).unwrap_or(end)))
            }
            "autoescape" | "call" | "do" | "elif" | "filter" | "if" | "macro" | "with" => {
                Some((1, end))
            }
            _ => None,
        }
    }

    fn text(&self, index: Option<usize>) -> &str {
        index.and_then(|it| self.tokens.get(it)).map_or("", |it| it.text)
    }

    /// Returns the text of the token `distance` tokens before.
    fn before(&self, index: usize, distance: usize) -> &str {
        self.text(index.checked_sub(distance))
    }

    /// Returns whether a value may end with the token.
    fn is_value(&self, index: usize) -> bool {
        self.tokens.get(index).is_some_and(|it| it.is_value(TokenKind::Close))
    }

    /// Returns whether a bracket is a call or a subscript.
    fn is_postfix(&self, open: usize) -> bool {
        open > self.start && self.is_value(open - 1)
    }

    /// Returns whether an opening bracket keeps the values in it, as [`Bracket::keeps_values`]
    /// says.
    fn keeps_values(&self, open: usize) -> bool {
        let is_filter = matches!(self.before(open, 2), "|" | "filter");
        match self.tokens[open].text {
            "(" if self.is_postfix(open) => is_filter,
            "(" => self.brackets[open].has_comma,
            "[" => !self.is_postfix(open),
            "{" => true,
            _ => false,
        }
    }

    /// Returns whether the token is the name of a test.
    fn is_test(&self, index: usize) -> bool {
        self.before(index, 1) == "is"
            || (self.before(index, 1) == "not" && self.before(index, 2) == "is")
    }

    fn is_digits(&self, index: usize) -> bool {
        self.text(Some(index)).starts_with(|it: char| it.is_ascii_digit())
    }

    /// Returns whether the token is a literal that costs nothing.
    fn is_literal(&self, index: usize) -> bool {
        let Some(token) = self.tokens.get(index) else { return false };
        let is_constant =
            matches!(token.text, "none" | "None" | "true" | "True" | "false" | "False");
        match token.kind {
            TokenKind::Text => token.text.len() <= MAX_FREE,
            TokenKind::Word => {
                (is_constant || self.is_digits(index)) && self.before(index, 1) != "."
            }
            _ => false,
        }
    }

    /// Returns whether the side of a comparison that ends at `index` is short. Products can be long
    /// lists.
    fn ends_with_literal(&self, index: usize) -> bool {
        self.is_literal(index) && !self.before(index, 1).starts_with('*')
    }

    /// Returns whether the side of a comparison that starts at `index` is short.
    fn starts_with_literal(&self, index: usize) -> bool {
        let index = index + usize::from(self.text(Some(index)) == "-");
        self.is_literal(index) && !self.text(Some(index + 1)).starts_with('*')
    }

    /// Returns whether the tag has an operation for which its loads are charged.
    fn is_charged(&self) -> bool {
        // The name of a template is in the error, which `ignore missing` drops.
        let is_name = self.start == 1 && TEMPLATE_STATEMENTS.contains(&self.tokens[0].text);
        is_name
            || (self.start..self.end).any(|index| {
                let previous = index.checked_sub(1);
                match self.tokens[index].text {
                    "==" | "!=" | "<" | "<=" | ">" | ">=" => {
                        !previous.is_some_and(|it| self.ends_with_literal(it))
                            && !self.starts_with_literal(index + 1)
                    }
                    "in" if !self.is_test(index) && self.before(index, 1) != "." => {
                        let left =
                            index.checked_sub(1 + usize::from(self.before(index, 1) == "not"));
                        !left.is_some_and(|it| self.ends_with_literal(it))
                            && !self.are_literals(index + 1)
                    }
                    "changed" if self.before(index, 1) == "." => true,
                    "[" if self.is_postfix(index) => self.is_key(index),
                    _ => {
                        let parent = self.brackets[index].parent.filter(|it| *it >= self.start);
                        let keeps_values = |it: usize| self.brackets[it].keeps_values;
                        parent.is_some_and(keeps_values) && self.is_load(index)
                    }
                }
            })
    }

    /// Returns whether the bracket has only literals.
    fn are_literals(&self, open: usize) -> bool {
        let is_open = self.tokens.get(open).is_some_and(|it| it.kind == TokenKind::Open);
        is_open
            && (open + 1..self.brackets[open].close)
                .all(|it| self.tokens[it].text == "," || self.is_literal(it))
    }

    /// Returns whether a subscript may be a text.
    fn is_key(&self, open: usize) -> bool {
        let (first, last) = (open + 1, self.brackets[open].close.saturating_sub(1));
        let is_number = |index: usize, sign: Option<usize>| {
            self.is_digits(index) && matches!(self.text(sign), "+" | "-" | "[")
        };
        let is_arithmetic = is_number(last, last.checked_sub(1))
            || (is_number(first, Some(first + 1)) && last == first + 2);
        let is_literal = first == last && self.is_literal(first);
        !(self.brackets[open].has_colon || is_arithmetic || is_literal)
    }

    /// Returns whether a subscript of a text costs little.
    fn is_cheap(&self, open: usize) -> bool {
        let first = open + 1;
        let is_small = !self.is_digits(first) || self.tokens[first].text.len() <= 3;
        self.brackets[open].close == first + 1 && self.is_literal(first) && is_small
    }

    /// Returns whether the token starts a value that is loaded.
    fn is_load(&self, index: usize) -> bool {
        match self.tokens[index].kind {
            TokenKind::Text => !self.is_literal(index),
            TokenKind::Word => self.is_variable(index),
            _ => false,
        }
    }

    fn is_variable(&self, index: usize) -> bool {
        const KEYWORDS: [&str; 12] =
            ["and", "elif", "else", "if", "in", "is", "not", "or", "none", "None", "true", "True"];
        let text = self.tokens[index].text;
        let is_keyword = KEYWORDS.contains(&text) || matches!(text, "false" | "False");
        let is_declared = index == 1 && matches!(self.text(Some(0)), "filter" | "macro");
        let is_name =
            matches!(self.before(index, 1), "." | "|") || is_declared || self.is_test(index);
        let is_target = self.text(Some(index + 1)) == "=" || self.is_parameter(index);
        !is_keyword && !is_name && !is_target && !self.is_digits(index)
    }

    /// Returns whether the token is a parameter of a macro or a call block.
    fn is_parameter(&self, index: usize) -> bool {
        let open = match self.text(Some(0)) {
            "macro" => 2,
            "call" => 1,
            _ => return false,
        };
        self.brackets[index].parent == Some(open)
            && self.text(Some(open)) == "("
            && matches!(self.before(index, 1), "(" | ",")
    }

    /// Charges the value that starts at `start`: before subscripts, and at its end if `is_charged`.
    fn charge(
        &self,
        start: usize,
        is_charged: bool,
        filter: &str,
        insertions: &mut Vec<(usize, String)>,
    ) {
        let token = &self.tokens[start];
        let mut part = match token.kind {
            _ if self.is_load(start) => ValuePart::Load,
            TokenKind::Text => ValuePart::Literal,
            TokenKind::Open if !self.is_postfix(start) => ValuePart::Group,
            _ => return,
        };
        let first = insertions.len();
        let mut last = if part == ValuePart::Group { self.brackets[start].close } else { start };
        while let Some(next) = self.tokens.get(last + 1).filter(|_| last + 1 < self.end) {
            let is_attribute = next.text == "." && last + 2 < self.end;
            let is_item = is_attribute && self.is_digits(last + 2);
            let is_expensive = match next.text {
                "[" => !self.is_cheap(last + 1),
                _ => is_item && self.tokens[last + 2].text.len() > 3,
            };
            if is_expensive && matches!(part, ValuePart::Load | ValuePart::Group) {
                insertions.push((token.start, "(".to_owned()));
                insertions.push((self.tokens[last].end(), format!("|{filter})")));
            }
            (part, last) = match next.text {
                "(" => (ValuePart::Call, self.brackets[last + 1].close),
                "[" => (ValuePart::Load, self.brackets[last + 1].close),
                _ if is_attribute => (ValuePart::Load, last + 2),
                _ => break,
            };
        }
        let Some(end) = self.tokens.get(last).map(Token::end) else { return };
        let is_filtered = self.text(Some(last + 2)) == filter;
        if is_charged && part == ValuePart::Load && !is_filtered {
            insertions.push((end, format!("|{filter}")));
        }
        // A filter would follow the test instead of its argument, which cannot start with a bracket
        // either.
        let is_argument = start > 0 && self.is_test(start - 1);
        if is_argument && insertions.len() > first {
            insertions.insert(first, (token.start, "(".to_owned()));
            insertions.push((end, ")".to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_uncharged_operations_are_charged() {
        let of =
            |body: &str| with_charged_loads(body, true, "f").unwrap_or_else(|| body.to_owned());
        assert_eq!(of("a.b == c"), "a.b|f == c|f");
        assert_eq!(of("a < b.c() + d[0]"), "a|f < b.c() + d[0]|f");
        assert_eq!(of("a not in b and x is y"), "a|f not in b|f and x|f is y");
        assert_eq!(of("a[-1]"), "(a|f)[-1]");
        assert_eq!(of("-a.b[i - 1].c[1:][2]"), "-((a.b|f)[i - 1].c|f)[1:][2]");
        assert_eq!(of("a[b]"), "(a|f)[b|f]|f");
        assert_eq!(of("(a or b)[-1]"), "((a or b)|f)[-1]");
        assert_eq!(of("a.1234"), "(a|f).1234");
        assert_eq!(of("{a: 1}['b']"), "{a|f: 1}['b']|f");
        assert_eq!(of("[a, 'b'] | sort"), "[a|f, 'b'] | sort");
        assert_eq!(of("a | replace(b, c=d)"), "a|f | replace(b|f, c=d|f)");
        assert_eq!(of("a is in b[-1]"), "a is in ((b|f)[-1])");
        assert_eq!(of("a is eq b == c"), "a|f is eq (b|f) == c|f");
        assert_eq!(of("loop.changed(a)"), "loop.changed(a|f)");
        assert_eq!(of("a|f * 2 == b|f * 3"), "a|f * 2 == b|f * 3");
        let long = format!("'{}'", "a".repeat(MAX_FREE));
        assert_eq!(of(&format!("{long} == a")), format!("{long}|f == a|f"));
        for same in [
            "a == 'b'",
            "1 < a",
            "a == -1",
            "a in ['b', 'c']",
            "'a' in b",
            "a['b'][0]",
            "a.b(c)",
            "a | b('c') and a is b",
            "a is not c",
            "f(a=b, *c, **d)",
            "1.5 * a",
            "[1, 'a', none]",
            "",
        ] {
            assert_eq!(of(same), same);
        }
    }

    #[test]
    fn statements_have_names_that_are_not_loads() {
        let of =
            |body: &str| with_charged_loads(body, false, "f").unwrap_or_else(|| body.to_owned());
        assert_eq!(of("set a, b.c = d == e"), "set a, b.c = d|f == e|f");
        assert_eq!(of("set a | replace(b, c)"), "set a | replace(b|f, c|f)");
        assert_eq!(
            of("for a in b[1:] if a == c recursive"),
            "for a in (b|f)[1:]|f if a|f == c|f recursive"
        );
        assert_eq!(of("for a in recursive[1:]"), "for a in (recursive|f)[1:]");
        assert_eq!(of("macro m(a, b=c[1:])"), "macro m(a, b=(c|f)[1:])");
        assert_eq!(of("call(a, b) m(c == d)"), "call(a, b) m(c|f == d|f)");
        assert_eq!(of("with a = b == c, d = e"), "with a = b|f == c|f, d = e|f");
        assert_eq!(of("include a ignore missing"), "include a|f ignore missing");
        assert_eq!(of("from [a] import b as c"), "from [a|f] import b as c");
        assert_eq!(of("filter replace(a, 'b')"), "filter replace(a|f, 'b')");
        assert_eq!(of("elif a != b"), "elif a|f != b|f");
        for same in ["endfor", "set a", "for a, b in c", "macro m(a, b=1)", "block a", "break", ""]
        {
            assert_eq!(of(same), same);
        }
    }
}
