//! What to write instead of an invalid value.
//!
//! The best remedy keeps the user's value and only changes its type: `"2e-5"` becomes `2e-5`, `[3]`
//! becomes `3`, and `"cpu"` becomes `{ "device": "cpu" }`. [`converted`] finds such a value. If a
//! value cannot be converted without loss, no other value is proposed: the default, for example,
//! would change what the job means.

use crate::key::{Key, Kind, Literal, SectionVariant, Status};
use crate::node::{Node, Value};
use crate::source::{SourceName, parse_json};
use crate::suggestion::nearest;

/// Maximum number of characters of a value that a remedy shows. A truncated value would not be a
/// remedy.
const LONGEST: usize = 60;

/// The keys whose value alone may stand for their section, as in `"offload_optimizer": "cpu"` and
/// `"zero_optimization": 3`.
const MAIN_KEYS: [&str; 4] = ["enabled", "stage", "device", "architecture"];

/// Returns what to write instead of an invalid value of `key`.
///
/// `siblings` is the section of the key. The size of a split depends on the other splits.
pub(crate) fn remedy(key: &Key, value: &Node, siblings: &Node) -> String {
    let is_nearly_auto = |text: &str| nearest(["auto"].into_iter(), &text.to_lowercase()).is_some();
    // Checked first: the conversions below would take a misspelled `"auto"` for any other text.
    if key.auto && value.as_text().is_some_and(is_nearly_auto) {
        return "write \"auto\"".to_owned();
    }
    if let Some(variant) = named_variant(&key.kind, value) {
        return format!("write {{ \"type\": \"{}\", \"params\": {{ ... }} }}", variant.name);
    }
    let meant = match key.kind {
        Kind::Split => percentage(value, siblings),
        kind => converted(&kind, value),
    };
    // A number in quotes is not a type or another name that has to be given.
    let meant = meant.filter(|_| !key.is_required() || value.as_text().is_some());
    if let Some(remedy) = meant.as_ref().and_then(rewriting) {
        return remedy;
    }
    let similar = match (key.kind, value.as_text()) {
        (Kind::Choice(names), Some(text)) => nearest(names.iter().copied(), &text.to_lowercase()),
        _ => None,
    };
    match key.default {
        Literal::Required => format!("give {}", key.kind),
        Literal::Text(_) if matches!(key.kind, Kind::Choice(_)) => {
            let choice = similar.map_or("choose one of them".to_owned(), |name| {
                format!("did you mean \"{name}\"? Choose one of them")
            });
            format!("{choice}, or leave the key out for {}", key.shown_default())
        }
        _ if similar.is_some() => format!("did you mean \"{}\"?", similar.unwrap_or_default()),
        Literal::Null => "give such a value or leave the key out".to_owned(),
        _ => format!("give such a value, or leave the key out for {}", key.shown_default()),
    }
}

/// Returns what to write instead of `value`, which must be a section without a key table. `example`
/// is such a section.
pub(crate) fn free_section(value: &Node, example: &str) -> String {
    let meant = converted(&Kind::Section(&[]), value);
    let remedy = meant.as_ref().and_then(rewriting);
    remedy.unwrap_or_else(|| format!("write {example} for example"))
}

/// Returns the remedy to write `meant`; `None` if it is too long for a message.
fn rewriting(meant: &Node) -> Option<String> {
    match (written(meant), &meant.value) {
        (Some(text), _) => Some(format!("write {text}")),
        (None, Value::Map(_)) => Some("write the section without quotes".to_owned()),
        (None, _) => None,
    }
}

/// Returns the value of this kind that has the same meaning as `value`, which is of another kind: a
/// value in quotes, 0 or 1 for a flag, a list of one value for a value, a value for a list of one,
/// or the value of the main key for a section.
pub(crate) fn converted(kind: &Kind, value: &Node) -> Option<Node> {
    let inside = |node: &Node| readings(node).into_iter();
    let list = value.as_list().unwrap_or_default();
    let elements = list.iter().map(unquoted).collect();
    let only = if let [only] = list { Some(only) } else { None };
    let alone = only.into_iter().flat_map(|only| std::iter::once(only.clone()).chain(inside(only)));
    let listed = |node: Node| Node::new(Value::List(vec![node]));
    // The order of preference: the first reading that the key accepts is proposed.
    let mut all: Vec<_> = inside(value).chain(alone).collect();
    match value.value {
        // `["0.9", "0.95"]`: only the elements are in quotes.
        Value::List(_) => all.push(Node::new(Value::List(elements))),
        // `8` for a key that takes a list.
        Value::Text(_) | Value::Number(_) => {
            let single = std::iter::once(value.clone()).chain(inside(value));
            all.extend(single.map(listed).collect::<Vec<_>>());
        }
        Value::Null | Value::Flag(_) | Value::Map(_) => {}
    }
    all.extend(section_of(kind, value));
    // Only what the key accepts is proposed, so that a remedy does not lead to another error.
    all.into_iter().find(|meant| kind.accepts(meant).is_ok() && !is_named_by_number(kind, meant))
}

/// Returns whether a number stands for a text that is not a number, such as the text of a token.
fn is_named_by_number(kind: &Kind, meant: &Node) -> bool {
    let texts = meant.as_list().unwrap_or(std::slice::from_ref(meant));
    matches!(kind, Kind::TextOf(_) | Kind::TextList | Kind::Texts)
        && texts.iter().any(|text| unquoted(text).as_real().is_some())
}

/// Returns the percentage that a number stands for as the size of a split.
///
/// All splits have the same unit: fractions, as in scikit-learn's `train_test_split`, if their sum
/// is at most 1, and else per cent. A number below 1 is a percentage only if nothing is left over.
fn percentage(value: &Node, siblings: &Node) -> Option<Node> {
    let number = value.as_real().filter(|number| *number > 0.0)?;
    let share = |node: &Node| node.as_text()?.trim().strip_suffix('%')?.parse::<f64>().ok();
    let splits = || siblings.entries().iter().map(|(_, node)| node);
    let sum: f64 = splits().filter_map(Node::as_real).sum();
    let written: f64 = splits().filter_map(share).sum();
    let rest = |unit: f64| 100.0 - (sum * unit + written);
    let fits = |unit: &f64| rest(*unit) >= -1e-9;
    // Fractions come first: numbers that add up to at most 1 are not meant as percentages.
    let unit = [100.0, 1.0].into_iter().find(fits)?;
    // 0.5 next to 10 may be a half or half a percent, and only a complete sum decides.
    if unit < 100.0 && number < 1.0 && rest(unit) > 1e-9 {
        return None;
    }
    // 0.07 * 100.0 is 7.000000000000001.
    Some(Node::text(format!("{}%", (number * unit * 1e9).round() / 1e9)))
}

/// Returns the value without quotes, if it is a number or a flag in quotes, and else the value
/// itself.
pub(crate) fn unquoted(value: &Node) -> Node {
    let inner = value.as_text().and_then(parsed);
    inner.filter(|inner| !matches!(inner.value, Value::Map(_))).unwrap_or_else(|| value.clone())
}

/// Returns the readings of a scalar as another type, the most literal one first.
fn readings(value: &Node) -> Vec<Node> {
    match &value.value {
        Value::Text(text) => {
            let inner = parsed(text);
            let as_flag = inner.as_ref().and_then(bit);
            let trimmed = (text.trim() != text).then(|| Node::text(text.trim()));
            // Numbers with commas, as on a command line or in Python.
            let numbers = text.trim().trim_start_matches('(').trim_end_matches(')');
            let listed = text.contains(',').then(|| parsed(&format!("[{numbers}]"))).flatten();
            [inner, as_flag, word(text), trimmed, listed].into_iter().flatten().collect()
        }
        Value::Number(text) => [bit(value), Some(Node::text(text))].into_iter().flatten().collect(),
        _ => Vec::new(),
    }
}

/// Parses a text as a JSON value other than a string, and its elements if it is a list.
fn parsed(text: &str) -> Option<Node> {
    let origin = SourceName { document: "value", name: "value" };
    let node = parse_json(text.trim(), origin).ok()?;
    let value = match node.value {
        Value::List(nodes) => Value::List(nodes.iter().map(unquoted).collect()),
        scalar @ (Value::Number(_) | Value::Flag(_)) => scalar,
        section @ Value::Map(_) => section,
        // A text in quotes, or `null` in quotes, is not closer to what was meant.
        Value::Null | Value::Text(_) => return None,
    };
    Some(Node::new(value))
}

/// Returns the flag that a word of Python or YAML stands for.
fn word(text: &str) -> Option<Node> {
    let flag = match &*text.trim().to_ascii_lowercase() {
        "true" | "yes" | "on" => true,
        "false" | "no" | "off" => false,
        _ => return None,
    };
    Some(Node::new(Value::Flag(flag)))
}

/// Returns the flag that the number 0 or 1 stands for.
fn bit(number: &Node) -> Option<Node> {
    let flag = match number.as_integer()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    Some(Node::new(Value::Flag(flag)))
}

/// Returns the section that `value` stands for, if it is the value of the section's main key.
fn section_of(kind: &Kind, value: &Node) -> Option<Node> {
    let (Kind::Section(keys) | Kind::SectionOrPath(keys)) = *kind else { return None };
    let main = MAIN_KEYS.into_iter().find_map(|name| Key::find(keys, name))?;
    // A remedy must not name a key that is then refused.
    if !matches!(main.status, Status::Honored) {
        return None;
    }
    let values = std::iter::once(value.clone()).chain(readings(value));
    let meant = values.into_iter().find(|value| main.kind.accepts(value).is_ok())?;
    Some(Node::map(vec![(main.name.to_owned(), meant)]))
}

/// Returns the variant whose name is given instead of a section, as in `"optimizer": "AdamW"`.
fn named_variant(kind: &Kind, value: &Node) -> Option<&'static SectionVariant> {
    let (Kind::Section(keys), Some(name)) = (*kind, value.as_text()) else { return None };
    let Kind::Variants(variants) = Key::find(keys, "params")?.kind else { return None };
    SectionVariant::find(variants, name)
}

/// Returns the value as it is written in a file; `None` if it is too long for a message.
fn written(value: &Node) -> Option<String> {
    let text = match &value.value {
        Value::Map(entries) => {
            let entry = |(name, node): &(String, Node)| {
                Some(format!("{}: {}", Node::text(name).to_json(), written(node)?))
            };
            let entries: Option<Vec<_>> = entries.iter().map(entry).collect();
            format!("{{ {} }}", entries?.join(", "))
        }
        Value::List(nodes) => {
            let nodes: Option<Vec<_>> = nodes.iter().map(written).collect();
            format!("[{}]", nodes?.join(", "))
        }
        Value::Number(text) => text.clone(),
        _ => value.to_json().to_string(),
    };
    (text.chars().count() <= LONGEST).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::DeepSpeed;
    use crate::section::Section;
    use crate::spec::*;

    fn node(json: &str) -> Node {
        parse_json(json, SourceName { document: "test", name: "test" }).unwrap()
    }

    /// The remedy for the only key of a section.
    fn alone(key: &Key, value: &Node) -> String {
        remedy(key, value, &Node::map(vec![(key.name.to_owned(), value.clone())]))
    }

    section! {
        /// A section with a switch.
        enum Switched {
            enabled = flag(false),
        }
    }

    const SHAPES: &[&str] = &["log", "linear"];

    #[test]
    fn a_value_of_another_type_keeps_its_meaning() {
        let (flag, number) = (flag(true).named("f", ""), real(Positive, 0.001).named("r", ""));
        let integer = count_in(0, 3, 0).named("i", "");
        let auto = count(7).auto().named("a", "");
        let shape = one_of(SHAPES, "log").named("s", "");
        let betas = pair(Decay, &[0.9, 0.999]).named("b", "");
        let sizes = opt_positives().named("l", "");
        let name = text("job").named("t", "");
        let token = opt_text_of("the text of a token").named("o", "");
        let (modules, texts) = (text_list().named("m", ""), texts().named("x", ""));
        let split = opt_split().named("train", "");
        let section = section::<Switched>().named("w", "");
        let top = |name| *Key::find(DeepSpeed::KEYS, name).unwrap();
        let (zero, optimizer) = (top("zero_optimization"), top("optimizer"));
        let compile = top("compile");
        let offload = *Key::find(zero.keys(), "offload_optimizer").unwrap();
        for (key, json, expected) in [
            (flag, "\"false\"", "write false"),
            (flag, "\"False\"", "write false"),
            (flag, "\" true \"", "write true"),
            (flag, "\"off\"", "write false"),
            (flag, "\"0\"", "write false"),
            (flag, "0", "write false"),
            (flag, "1.0", "write true"),
            (flag, "[false]", "write false"),
            (flag, "2", "give such a value, or leave the key out for true"),
            (number, "\"2e-5\"", "write 2e-5"),
            (number, "[\"2e-5\"]", "write 2e-5"),
            (number, "\"-1\"", "give such a value, or leave the key out for 0.001"),
            (number, "\"1e-400\"", "give such a value, or leave the key out for 0.001"),
            (integer, "\"3\"", "write 3"),
            (integer, "\"3.0\"", "write 3.0"),
            (integer, "[2]", "write 2"),
            (integer, "\"4\"", "give such a value, or leave the key out for 0"),
            (integer, "\"2.5\"", "give such a value, or leave the key out for 0"),
            (integer, "true", "give such a value, or leave the key out for 0"),
            (integer, "{\"a\": 1}", "give such a value, or leave the key out for 0"),
            (auto, "\"Auto\"", "write \"auto\""),
            (auto, "\"atuo\"", "write \"auto\""),
            (auto, "\"5e8\"", "write 5e8"),
            (shape, "\" linear\"", "write \"linear\""),
            (
                shape,
                "\"linaer\"",
                "did you mean \"linear\"? Choose one of them, or leave the key out for \"log\"",
            ),
            (shape, "3", "choose one of them, or leave the key out for \"log\""),
            (betas, "[\"0.9\", \"0.95\"]", "write [0.9, 0.95]"),
            (betas, "\"[0.9, 0.95]\"", "write [0.9, 0.95]"),
            (betas, "\"0.9,0.99\"", "write [0.9, 0.99]"),
            (betas, "\"(0.9, 0.99)\"", "write [0.9, 0.99]"),
            (sizes, "\"8, 16\"", "write [8, 16]"),
            (betas, "[0.9]", "give such a value, or leave the key out for [0.9, 0.999]"),
            (sizes, "8", "write [8]"),
            (sizes, "\"8\"", "write [8]"),
            (sizes, "[\"8\", 16]", "write [8, 16]"),
            (name, "3", "write \"3\""),
            (token, "0", "give such a value or leave the key out"),
            (token, "[\"0\"]", "give such a value or leave the key out"),
            (token, "[\"</s>\"]", "write \"</s>\""),
            (modules, "3", "give such a value or leave the key out"),
            (modules, "[\"a\", 3]", "give such a value or leave the key out"),
            (modules, "\"nn.Linear\"", "write [\"nn.Linear\"]"),
            (texts, "3", "give such a value or leave the key out"),
            (split, "0.9", "write \"90%\""),
            (split, "0.07", "write \"7%\""),
            (split, "1", "write \"100%\""),
            (split, "90", "write \"90%\""),
            (split, "7.5", "write \"7.5%\""),
            (split, "0", "give such a value or leave the key out"),
            (split, "500", "give such a value or leave the key out"),
            (compile, "3", "give such a value or leave the key out"),
            (compile, "true", "give such a value or leave the key out"),
            (section, "true", "write { \"enabled\": true }"),
            (section, "\"true\"", "write { \"enabled\": true }"),
            (section, "1", "write { \"enabled\": true }"),
            (section, r#""{\"enabled\": false}""#, "write { \"enabled\": false }"),
            (section, r#""{\"a\": {\"b\": 1e-5}}""#, "write { \"a\": { \"b\": 1e-5 } }"),
            (section, "\"on the GPU\"", "give such a value or leave the key out"),
            (offload, "\"cpu\"", "write { \"device\": \"cpu\" }"),
            (offload, "\"gpu\"", "give such a value or leave the key out"),
            (zero, "3", "write { \"stage\": 3 }"),
            (zero, "\"2\"", "write { \"stage\": 2 }"),
            (zero, "4", "give such a value or leave the key out"),
            (optimizer, "\"adamw\"", "write { \"type\": \"AdamW\", \"params\": { ... } }"),
            (optimizer, r#""{\"type\": \"Lion\"}""#, "write { \"type\": \"Lion\" }"),
            (optimizer, "\"none\"", "give such a value or leave the key out"),
        ] {
            assert_eq!(alone(&key, &node(json)), expected, "{}: {json}", key.name);
        }
    }

    #[test]
    fn the_sizes_of_all_splits_have_one_unit() {
        let split = opt_split().named("train", "");
        let none = "give such a value or leave the key out";
        for (train, rest, expected) in [
            ("99", r#""eval": 1"#, "write \"99%\""),
            ("1", r#""eval": 99"#, "write \"1%\""),
            ("1", r#""eval": "5%""#, "write \"1%\""),
            ("0.9", r#""eval": 0.1"#, "write \"90%\""),
            ("0.9", r#""eval": "10%""#, "write \"90%\""),
            ("0.9", r#""test": 0.2"#, none),
            ("0.9", r#""eval": 10"#, none),
            ("0.5", r#""eval": 99.5"#, "write \"0.5%\""),
            ("80", r#""eval": 20, "test": 10"#, none),
            ("80", r#""eval": "30%""#, none),
            ("80", r#""eval": "test""#, "write \"80%\""),
        ] {
            let section = node(&format!("{{\"train\": {train}, {rest}}}"));
            assert_eq!(remedy(&split, &node(train), &section), expected, "{train}, {rest}");
        }
    }

    #[test]
    fn long_values_are_not_repeated() {
        let long = Node::text("9".repeat(100));
        let key = real(Positive, 0.5).named("r", "");
        assert_eq!(alone(&key, &long), "give such a value, or leave the key out for 0.5");
        let section = section::<Switched>().named("w", "");
        let long = Node::text(format!("{{\"enabled\": {}true}}", " ".repeat(50)));
        assert_eq!(alone(&section, &long), "write { \"enabled\": true }");
        let long = Node::text(format!("{{\"note\": \"{}\"}}", "n".repeat(60)));
        assert_eq!(alone(&section, &long), "write the section without quotes");
        let example = "{ \"n_layer\": 12 }";
        let config = |text| free_section(&Node::text(text), example);
        assert_eq!(config("{\"n_embd\": 32}"), "write { \"n_embd\": 32 }");
        assert_eq!(config("gpt2"), "write { \"n_layer\": 12 } for example");
    }
}
