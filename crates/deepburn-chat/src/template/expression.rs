//! The tokens of expressions in tags.

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// A name, a keyword or a number.
    Word,
    /// A string with its quotes.
    Text,
    /// An opening bracket.
    Open,
    /// A closing bracket.
    Close,
    /// Anything else, such as an operator.
    Symbol,
}

/// A token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
    /// Its position in bytes.
    pub(super) start: usize,
    /// The number of brackets around it.
    pub(super) depth: usize,
}

impl Token<'_> {
    /// Returns the position after the token.
    pub(super) fn end(&self) -> usize {
        self.start + self.text.len()
    }

    fn is(&self, kind: TokenKind, text: &str) -> bool {
        self.kind == kind && self.text == text
    }

    /// Returns whether this is a word that is not inside of brackets.
    pub(super) fn is_word(&self, word: &str) -> bool {
        self.depth == 0 && self.is(TokenKind::Word, word)
    }

    /// Returns whether this is a symbol that is not inside of brackets.
    pub(super) fn is_symbol(&self, symbol: &str) -> bool {
        self.depth == 0 && self.is(TokenKind::Symbol, symbol)
    }

    /// Returns whether a value may begin or end with this token.
    pub(super) fn is_value(&self, bracket: TokenKind) -> bool {
        const KEYWORDS: [&str; 8] = ["and", "elif", "else", "if", "in", "is", "not", "or"];
        match self.kind {
            TokenKind::Word => !KEYWORDS.contains(&self.text),
            kind => kind == TokenKind::Text || kind == bracket,
        }
    }
}

/// Returns the tokens of the body of a tag. An unclosed string is one token.
pub(super) fn tokens(body: &str) -> Vec<Token<'_>> {
    let bytes = body.as_bytes();
    let (mut tokens, mut start, mut depth) = (Vec::new(), 0, 0_usize);
    while let Some(byte) = bytes.get(start) {
        let rest = &bytes[start + 1..];
        let while_word = || rest.iter().take_while(|it| is_word(**it)).count();
        let mut token_depth = depth;
        let (kind, length) = match byte {
            it if it.is_ascii_whitespace() => {
                start += 1;
                continue;
            }
            b'"' | b'\'' => (TokenKind::Text, text_length(*byte, rest)),
            b'(' | b'[' | b'{' => {
                depth += 1;
                (TokenKind::Open, 0)
            }
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                token_depth = depth;
                (TokenKind::Close, 0)
            }
            it if is_word(*it) => (TokenKind::Word, while_word()),
            // `**` and `//` are operators of their own.
            b'*' | b'/' => (TokenKind::Symbol, usize::from(rest.first() == Some(byte))),
            // `==`, `!=`, `<=` and `>=` have two characters.
            _ => (TokenKind::Symbol, usize::from(rest.first() == Some(&b'='))),
        };
        let text = &body[start..=start + length];
        tokens.push(Token { kind, text, start, depth: token_depth });
        start += 1 + length;
    }
    tokens
}

/// Returns the bytes of a string after its first quote.
fn text_length(quote: u8, rest: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = rest.iter().position(|byte| {
        let is_end = *byte == quote && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(rest.len(), |end| end + 1)
}

fn is_word(byte: u8) -> bool {
    // All bytes beyond ASCII, so that no token ends within a character.
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// How much more than another operation a slice or a product weighs. The engine computes it while
/// it is walked, so the work of a chain of them grows with the square of its length.
pub(super) const LAZY_WEIGHT: usize = 30;

/// The maximum bytes of a name that weighs the same as a short one. Names are compared when a
/// template reads variables.
pub(super) const MAX_LIGHT_NAME: usize = 256;

/// Returns the number of words, strings and symbols in the body of a tag, where slices and products
/// count [`LAZY_WEIGHT`] times, and long names as many times as they have bytes.
pub(super) fn weight(body: &str) -> usize {
    let weight = |it: &Token| match it.kind {
        TokenKind::Word if it.text.len() > MAX_LIGHT_NAME => it.text.len(),
        _ if matches!(it.text, ":" | "*") => LAZY_WEIGHT,
        _ => 1,
    };
    tokens(body).iter().map(weight).sum()
}

/// Returns the body of a tag with `filter` applied to both sides of all products, or `None` if it
/// has no product.
///
/// A filter binds stronger than an operator, so it only needs to follow the last part of a side.
pub(super) fn with_filtered_products(body: &str, filter: &str) -> Option<String> {
    if !body.contains('*') {
        return None;
    }
    let tokens = tokens(body);
    let mut ends = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let (left, right) = tokens.split_at(index);
        let ([.., last], true) = (left, token.is(TokenKind::Symbol, "*")) else { continue };
        // An argument of a test without brackets is a part of the test.
        let is_test = left.iter().rev().nth(1).is_some_and(|it| matches!(it.text, "is" | "not"));
        if !last.is_value(TokenKind::Close) {
            continue;
        }
        if !is_test {
            ends.push(last.end());
        }
        ends.extend(operand_end(&right[1..]));
    }
    ends.dedup();
    let (mut filtered, mut start) = (String::new(), 0);
    for end in ends {
        filtered.extend([&body[start..end], "|", filter]);
        start = end;
    }
    filtered.push_str(&body[start..]);
    Some(filtered)
}

/// Returns the position after the value at the start of `tokens`, with its attributes, items, calls
/// and filters.
fn operand_end(tokens: &[Token]) -> Option<usize> {
    let first = tokens.first().filter(|it| it.is_value(TokenKind::Open))?;
    let close = |open: usize| {
        let depth = tokens[open].depth;
        let is_close = |it: &Token| it.kind == TokenKind::Close && it.depth == depth;
        tokens[open..].iter().position(is_close).map(|it| open + it)
    };
    let mut last = if first.kind == TokenKind::Open { close(0)? } else { 0 };
    while let Some(next) = tokens.get(last + 1) {
        last = match (next.kind, next.text) {
            (TokenKind::Open, "(" | "[") => close(last + 1)?,
            (TokenKind::Symbol, "." | "|") if tokens.get(last + 2)?.kind == TokenKind::Word => {
                last + 2
            }
            _ => break,
        };
    }
    Some(tokens[last].end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_products_are_filtered() {
        let of = |body: &str| with_filtered_products(body, "f").unwrap();
        assert_eq!(of(" a * b "), " a|f * b|f ");
        assert_eq!(of("a*b*c + d"), "a|f*b|f*c|f + d");
        assert_eq!(
            of("x.y[1:](2)|g * [0, '*'][1:].z(a)|h(b)|i - 1"),
            "x.y[1:](2)|g|f * [0, '*'][1:].z(a)|h(b)|i|f - 1"
        );
        assert_eq!(of("(a + b) * 1.5 if x else y"), "(a + b)|f * 1.5|f if x else y");
        assert_eq!(of("f(a * 2)[b * c]"), "f(a|f * 2|f)[b|f * c|f]");
        assert_eq!(of("a is odd * 2"), "a is odd * 2|f");
        assert_eq!(of("'a' * -1"), "'a'|f * -1");
        for same in ["f(*a, **b)", "a ** b", "'*'", "a * ", "* a", "a * (b", "a and * b"] {
            assert_eq!(of(same).replace("|f", ""), same);
        }
        assert_eq!(of("f(*a, **b) ** c"), "f(*a, **b) ** c");
        assert_eq!(with_filtered_products("a + b", "f"), None);
    }

    #[test]
    fn tokens_know_their_brackets() {
        let texts =
            |body| tokens(body).iter().map(|it| (it.text.to_owned(), it.depth)).collect::<Vec<_>>();
        let of = |pairs: &[(&str, usize)]| {
            pairs.iter().map(|(text, depth)| ((*text).to_owned(), *depth)).collect::<Vec<_>>()
        };
        let expected = [
            ("a", 0),
            ("(", 0),
            ("é1", 1),
            ("==", 1),
            (r#""\"(""#, 1),
            (")", 0),
            ("**", 0),
            ("2", 0),
        ];
        assert_eq!(texts(r#"a(é1 == "\"(")**2"#), of(&expected));
        assert_eq!(texts(")'a"), of(&[(")", 0), ("'a", 0)]));
    }
}
