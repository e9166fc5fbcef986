//! The escapes in strings of expressions.

use super::expression::{TokenKind, tokens};

//= jinja2 3.1.6 lexer.py TOKEN_STRING
/// Returns the body of a tag whose strings have the escapes of Python, or `None` if they have the
/// same ones in minijinja, which has JSON's escapes.
pub(super) fn with_escapes(body: &str) -> Option<String> {
    if !body.contains('\\') {
        return None;
    }
    let (mut written, mut from) = (String::new(), 0);
    for token in tokens(body).iter().filter(|it| it.kind == TokenKind::Text) {
        let mut at = token.start;
        while let Some(found) = body[at..token.end()].find('\\') {
            let start = at + found;
            let (replaced, length) = escape(&body[start + 1..token.end()]);
            at = start + 1 + length;
            if let Some(replaced) = replaced {
                written.extend([&body[from..start], &replaced]);
                from = at;
            }
        }
    }
    written.push_str(&body[from..]);
    (from > 0).then_some(written)
}

/// Returns what replaces a backslash and the escape at the start of `text`, and the bytes of the
/// escape.
fn escape(text: &str) -> (Option<String>, usize) {
    let Some(letter) = text.chars().next() else { return (None, 0) };
    let replaced = match letter {
        'a' => r"\x07".to_owned(),
        'v' => r"\x0b".to_owned(),
        // Python knows no such escape, so the backslash stays.
        '/' => r"\\/".to_owned(),
        // The end of a line is left out.
        '\n' => String::new(),
        'U' => match text.get(1..9).and_then(surrogates) {
            Some(escaped) => return (Some(escaped), 9),
            None => return (Some(INVALID.to_owned()), 1),
        },
        // Names of characters are not known here.
        'N' => INVALID.to_owned(),
        _ => return (None, letter.len_utf8()),
    };
    (Some(replaced), letter.len_utf8())
}

/// An escape that minijinja refuses, whatever follows.
const INVALID: &str = r"\xgg";

/// Returns a character as the escapes of JSON.
fn surrogates(digits: &str) -> Option<String> {
    if !digits.bytes().all(|it| it.is_ascii_hexdigit()) {
        return None;
    }
    let char = char::from_u32(u32::from_str_radix(digits, 16).ok()?)?;
    Some(char.encode_utf16(&mut [0; 2]).iter().map(|it| format!(r"\u{it:04x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    //= jinja2 3.1.6 lexer.py TOKEN_STRING
    #[test]
    fn escapes_of_python_become_escapes_of_json() {
        let of = |body: &str| with_escapes(body).unwrap();
        assert_eq!(of(r"'\U0001F600' ~ '\U00000041b'"), r"'\ud83d\ude00' ~ '\u0041b'");
        assert_eq!(of(r#"a['\a\v'] ~ "\/é""#), r#"a['\x07\x0b'] ~ "\\/é""#);
        assert_eq!(of("'a\\\nb'"), "'ab'");
        assert_eq!(of(r"'\N{BULLET}\U0001'"), r"'\xgg{BULLET}\xgg0001'");
        for same in [r"'\\a\n\u00e9\'\q\é'", r"'\\U0001F600'", "a", r"a \a", r"'\"] {
            assert_eq!(with_escapes(same), None, "{same}");
        }
    }
}
