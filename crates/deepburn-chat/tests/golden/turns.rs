//! Assistant turns of templates without marks, against TRL's marked versions of the same templates.

use std::collections::HashMap;

use deepburn_chat::render_with_turns;
use serde_json::Value;

use crate::chat::Case;
use crate::{files, golden, json, lines};

#[test]
fn explore() {
    let Some(golden) = golden() else { return };
    let conversations = lines(&golden.join("sft/data/conversations.jsonl"));
    let files: HashMap<String, Value> = files(&golden.join("sft/chat"))
        .iter()
        .map(|it| json(it))
        .map(|it| (it["template"].as_str().unwrap().to_owned(), it))
        .collect();
    let mut names: Vec<_> = files.keys().collect();
    names.sort();
    for name in names {
        let file = &files[name];
        let case = Case::read(&golden, file);
        let own = name.starts_with("own");
        if case.template.marks_generation() && !own { continue; }
        let base = name.as_str();
        let base = match base { "trl_phi3_5" => "trl_phi3", "trl_llama3_1" | "trl_llama3_2" => "-", it => it };
        let marked = files.get(&format!("{base}_training"));
        let marked = if own { Some(file) } else { marked };
        let template = if own { case.unmarked() } else { None };
        for row in file["rows"].as_array().unwrap() {
            if row["kwargs"] != serde_json::json!({}) || !row["text"].is_string() { continue; }
            let conversation = conversations.iter().find(|it| it["name"] == row["conversation"]).unwrap();
            let (messages, context) = case.inputs(conversation, &row["kwargs"]);
            let template = template.as_ref().unwrap_or(&case.template);
            let found = render_with_turns(template, &messages, &context, &case.tokens);
            match found {
                Err(error) => println!("REFUSED {name} {}: {error}", row["conversation"]),
                Ok(found) => {
                    let texts: Vec<&str> = found.generated.iter().map(|it| &found.text[it.clone()]).collect();
                    let other = marked.and_then(|it| it["rows"].as_array().unwrap().iter().find(|it| it["conversation"] == row["conversation"] && it["kwargs"] == row["kwargs"]));
                    let Some(other) = other.filter(|it| it["text"].is_string()) else { println!("no golden {name} {}: {texts:?}", row["conversation"]); continue };
                    let chars: Vec<char> = other["text"].as_str().unwrap().chars().collect();
                    let theirs: Vec<String> = other["spans"].as_array().unwrap().iter().map(|it| chars[it[0].as_u64().unwrap() as usize..it[1].as_u64().unwrap() as usize].iter().collect()).collect();
                    let same_text = other["text"] == row["text"];
                    let verdict = if texts == theirs { "same" } else { "DIFF" };
                    println!("{verdict} text_same={same_text} {name} {}", row["conversation"]);
                    if verdict == "DIFF" { println!("    ours {texts:?}\n    trl  {theirs:?}"); }
                }
            }
        }
    }
}
