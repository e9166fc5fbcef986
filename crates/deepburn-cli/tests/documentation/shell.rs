//! Splits shell commands into words.

/// Splits a script into commands, and commands into words. Only quotes, comments and continued
/// lines are supported.
pub(crate) fn commands(script: &str) -> Vec<Vec<String>> {
    let mut commands = vec![vec![]];
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = script.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') if chars.peek() == Some(&'\n') => {
                chars.next();
            }
            (None, '#') if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            (None, ' ' | '\n') => {
                let last = commands.last_mut().unwrap();
                last.extend(word.take());
                if c == '\n' && !last.is_empty() {
                    commands.push(vec![]);
                }
            }
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    commands.last_mut().unwrap().extend(word);
    commands.retain(|words| !words.is_empty());
    commands
}

#[test]
fn commands_are_split_like_a_shell_does() {
    let script = "a 'b\nc' \\\n  \"d e\" # f\n\n g=1 h\n";
    assert_eq!(commands(script), [vec!["a", "b\nc", "d e"], vec!["g=1", "h"]]);
}
