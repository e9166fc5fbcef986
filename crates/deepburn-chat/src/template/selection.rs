//! The templates of a model folder, and the special tokens that they print.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::{ChatTemplate, Day, tags, with_line_feeds};
use crate::{ChatError, Result};

/// The file with the template, which takes precedence over the configuration.
const FILE: &str = "chat_template.jinja";

/// The folder with more templates by name.
const FOLDER: &str = "additional_chat_templates";

/// The file with the tokenizer's configuration.
const CONFIG: &str = "tokenizer_config.json";

/// The maximum bytes of a file. The largest known template has 30 kB.
const MAX_BYTES: u64 = 16 << 20;

/// The name of the template for conversations without tools.
const DEFAULT: &str = "default";

/// The name of the template for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The chat templates of a model.
///
/// Most models have one template. Some have several with names, of which `tool_use` is for
/// conversations with tools.
#[derive(Debug)]
pub struct ChatTemplates {
    templates: BTreeMap<String, ChatTemplate>,
    sources: BTreeMap<String, String>,
}

impl ChatTemplates {
    /// Compiles one template for all conversations. Its clock shows `day`.
    ///
    /// # Errors
    /// Returns [`ChatError::Syntax`] if the template is not valid.
    pub fn single(source: &str, day: Day) -> Result<Self> {
        Self::compile([(DEFAULT.to_owned(), source.to_owned())].into(), day)
    }

    /// Reads the templates of a model folder: `chat_template.jinja` with
    /// `additional_chat_templates/*.jinja`, or the field `chat_template` of
    /// `tokenizer_config.json`. Their clock shows `day`.
    ///
    /// # Errors
    /// Returns an error if there is no template, or if a file cannot be read or is not valid.
    pub fn of_folder(folder: &Path, day: Day) -> Result<Self> {
        Self::find(folder, day)?.ok_or_else(|| {
            ChatError::Template(format!(
                "{} has no chat template: it needs {FILE}, or `chat_template` in {CONFIG}; base models have none, so \
                 copy the one of the model's chat version, or train on `text`",
                folder.display()
            ))
        })
    }

    /// Reads the templates of a model folder, like [`of_folder`](Self::of_folder); `None` if it has
    /// none.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is not valid.
    pub fn find(folder: &Path, day: Day) -> Result<Option<Self>> {
        let mut sources = BTreeMap::new();
        if let Some(source) = read(&folder.join(FILE))? {
            sources.insert(DEFAULT.to_owned(), source);
        }
        for entry in std::fs::read_dir(folder.join(FOLDER)).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_template = path.extension().is_some_and(|it| it == "jinja");
            let name = path.file_stem().and_then(|it| it.to_str()).filter(|_| is_template);
            if let (Some(name), Some(source)) = (name, read(&path)?) {
                sources.insert(name.to_owned(), source);
            }
        }
        if sources.is_empty() {
            sources = of_config(&read_json(&folder.join(CONFIG))?)?;
        }
        // A template without text would print no message.
        sources.retain(|_, source| !source.trim().is_empty());
        match sources.is_empty() {
            true => Ok(None),
            false => Self::compile(sources, day).map(Some),
        }
    }

    fn compile(sources: BTreeMap<String, String>, day: Day) -> Result<Self> {
        let compiled = |(name, source): (&String, &String)| {
            Ok((name.clone(), ChatTemplate::at(source, day.start())?))
        };
        let templates = sources.iter().map(compiled).collect::<Result<_>>()?;
        Ok(Self { templates, sources })
    }

    /// Returns the template for a conversation with or without tools.
    ///
    /// # Errors
    /// Returns [`ChatError::Template`] if no template has one of the names `default` and
    /// `tool_use`.
    pub fn select(&self, has_tools: bool) -> Result<&ChatTemplate> {
        let tool_use = has_tools.then(|| self.templates.get(TOOL_USE)).flatten();
        tool_use.or_else(|| self.templates.get(DEFAULT)).ok_or_else(|| self.no_default())
    }

    /// Returns the source of the template for conversations without tools, without
    /// `{% generation %}` marks, which only `transformers` knows.
    ///
    /// # Errors
    /// Returns [`ChatError::Template`] if no template has the name `default`.
    pub fn source_without_marks(&self) -> Result<String> {
        let source = self.sources.get(DEFAULT).ok_or_else(|| self.no_default())?;
        Ok(tags::without_generation(&with_line_feeds(source)))
    }

    /// Returns the error about templates without a default.
    fn no_default(&self) -> ChatError {
        let names: Vec<_> = self.templates.keys().map(|it| format!("`{it}`")).collect();
        ChatError::Template(format!(
            "the model's chat templates are called {}, and none is called `{DEFAULT}`; save the one to use as {FILE}",
            names.join(", ")
        ))
    }

    /// Returns whether a template prints the date or the time.
    pub fn uses_clock(&self) -> bool {
        self.templates.values().any(ChatTemplate::uses_clock)
    }

    /// Returns the sources by name.
    pub fn sources(&self) -> &BTreeMap<String, String> {
        &self.sources
    }
}

/// Returns the templates in a `tokenizer_config.json`.
fn of_config(config: &Value) -> Result<BTreeMap<String, String>> {
    let invalid = || {
        let rule = "a text, or a list of objects with the texts `name` and `template`";
        ChatError::field(format!("{CONFIG}: chat_template"), "another value", rule)
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(BTreeMap::new()),
        Some(Value::String(source)) => Ok([(DEFAULT.to_owned(), source.clone())].into()),
        Some(Value::Array(named)) => {
            let text =
                |it: &Value, name: &str| it.get(name).and_then(Value::as_str).map(str::to_owned);
            let pair = |it| text(it, "name").zip(text(it, "template")).ok_or_else(invalid);
            named.iter().map(pair).collect()
        }
        Some(_) => Err(invalid()),
    }
}

/// Reads a text file, or returns `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>> {
    let failed = |reason: String| ChatError::Template(format!("{}: {reason}", path.display()));
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error.to_string())),
        // Before the file is in memory.
        Ok(metadata) if metadata.len() > MAX_BYTES => {
            return Err(failed(format!("the file has more than {MAX_BYTES} bytes")));
        }
        Ok(_) => {}
    }
    std::fs::read_to_string(path).map(Some).map_err(|error| failed(error.to_string()))
}

/// Reads a JSON file; a missing file is an empty object.
fn read_json(path: &Path) -> Result<Value> {
    let Some(text) = read(path)? else { return Ok(Value::Object(Map::new())) };
    serde_json::from_str(&text)
        .map_err(|error| ChatError::Template(format!("{}: {error}", path.display())))
}

/// The special tokens of a tokenizer, such as `bos_token`: variables of a template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecialTokens(Map<String, Value>);

impl SpecialTokens {
    /// Returns the tokens with these names, such as `("eos_token", "</s>")`.
    pub fn new<'a>(tokens: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self(tokens.into_iter().map(|(name, token)| (name.to_owned(), token.into())).collect())
    }

    /// Reads the tokens of a model folder, from `tokenizer_config.json` or the older
    /// `special_tokens_map.json`.
    ///
    /// # Errors
    /// Returns an error if a file is not valid, or if a token is not a text.
    pub fn of_folder(folder: &Path) -> Result<Self> {
        let mut tokens = Map::new();
        // The configuration is last, so that its tokens replace the older file's.
        for name in ["special_tokens_map.json", CONFIG] {
            let Value::Object(fields) = read_json(&folder.join(name))? else { continue };
            for (field, value) in
                fields.iter().filter(|(field, value)| field.ends_with("_token") && !value.is_null())
            {
                // Flags such as `add_bos_token` have a similar name.
                let text = match value {
                    Value::Bool(_) => continue,
                    Value::Object(token) => token.get("content").and_then(Value::as_str),
                    value => value.as_str(),
                };
                let Some(text) = text else {
                    let rule = "a text, or an object with the text `content`";
                    return Err(ChatError::field(
                        format!("{name}: {field}"),
                        value.to_string(),
                        rule,
                    ));
                };
                tokens.insert(field.clone(), text.into());
            }
        }
        Ok(Self(tokens))
    }

    /// Returns the tokens with another one in place of `name`.
    #[must_use]
    pub fn with(mut self, name: &str, token: &str) -> Self {
        self.0.insert(name.to_owned(), token.into());
        self
    }

    /// Returns a token by name, such as `eos_token`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    pub(crate) fn variables(&self) -> &Map<String, Value> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::{ChatContext, ConversationEnd, Message};

    fn rendered(templates: &ChatTemplates, has_tools: bool) -> String {
        let (context, tokens) = (ChatContext::default(), SpecialTokens::default());
        let template = templates.select(has_tools).unwrap();
        let messages = [Message::text("user", "a")];
        template.render(&messages, &context, &tokens, ConversationEnd::Complete).unwrap().text
    }

    #[test]
    fn templates_print_the_day_that_they_are_given() {
        let day = "2026-07-04".parse().unwrap();
        let source = "{{ strftime_now('%d %b %Y') }}";
        let templates = ChatTemplates::single(source, day).unwrap();
        assert!(templates.uses_clock());
        assert_eq!(rendered(&templates, false), "04 Jul 2026");
        let folder = deepburn_fuzz::scratch_folder();
        fs::write(folder.path().join(FILE), source).unwrap();
        let templates = ChatTemplates::of_folder(folder.path(), day).unwrap();
        assert_eq!(rendered(&templates, false), "04 Jul 2026");
    }

    #[test]
    fn templates_without_text_are_none() {
        let folder = deepburn_fuzz::scratch_folder();
        for (name, text) in [(FILE, "\n"), (CONFIG, r#"{"chat_template": ""}"#)] {
            fs::write(folder.path().join(name), text).unwrap();
            assert!(ChatTemplates::find(folder.path(), Day::today()).unwrap().is_none());
        }
    }

    #[test]
    fn templates_are_selected_as_in_transformers() {
        let folder = deepburn_fuzz::scratch_folder();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let error = ChatTemplates::of_folder(folder.path(), Day::today()).unwrap_err().to_string();
        assert!(error.contains("has no chat template"), "{error}");
        assert!(ChatTemplates::find(folder.path(), Day::today()).unwrap().is_none());

        let named = |name: &str| json!({"name": name, "template": format!("config {name}")});
        let config = json!({"chat_template": [named("default"), named("tool_use"), named("rag")],
            "eos_token": {"content": "</s>", "lstrip": false}, "bos_token": null, "add_bos_token": true});
        write(CONFIG, &config.to_string());
        let templates = ChatTemplates::of_folder(folder.path(), Day::today()).unwrap();
        assert_eq!(rendered(&templates, false), "config default");
        assert_eq!(rendered(&templates, true), "config tool_use");
        let tokens = SpecialTokens::of_folder(folder.path()).unwrap();
        assert_eq!(tokens, SpecialTokens::new([("eos_token", "</s>")]));

        write(FILE, "file");
        let templates = ChatTemplates::of_folder(folder.path(), Day::today()).unwrap();
        assert_eq!([false, true].map(|it| rendered(&templates, it)), ["file", "file"]);
        fs::create_dir(folder.path().join(FOLDER)).unwrap();
        write("additional_chat_templates/tool_use.jinja", "file tools");
        let templates = ChatTemplates::of_folder(folder.path(), Day::today()).unwrap();
        assert_eq!([false, true].map(|it| rendered(&templates, it)), ["file", "file tools"]);

        write(FILE, "a{% generation -%}\r\nb{% endgeneration %}");
        let source =
            ChatTemplates::of_folder(folder.path(), Day::today()).unwrap().source_without_marks();
        assert_eq!(source.unwrap(), "a{% if true -%}\nb{% endif %}");

        fs::remove_file(folder.path().join(FILE)).unwrap();
        let templates = ChatTemplates::of_folder(folder.path(), Day::today()).unwrap();
        assert!(
            templates.select(false).unwrap_err().to_string().contains("none is called `default`")
        );
        write(FILE, "a\n{{ b");
        let error = ChatTemplates::of_folder(folder.path(), Day::today()).unwrap_err();
        assert!(matches!(error, ChatError::Syntax { line: 2, .. }), "{error}");
    }
}
