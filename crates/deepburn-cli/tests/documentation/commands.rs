//! Checks that the programs, subcommands, options, files and keys of commands in the documentation
//! exist.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::configurations::known_keys;
use crate::markdown::{Page, root};
use crate::{run, shell};

/// Options of Cargo without a value.
const CARGO_FLAGS: [&str; 6] =
    ["--release", "--workspace", "--bins", "--lib", "--no-deps", "--open"];

/// Programs that are not part of DeepBurn and are not checked.
const OTHERS: [&str; 9] =
    ["git", "cd", "echo", "mdbook", "mpirun", "srun", "node-a", "llama-cli", "ollama"];

#[test]
fn commands_exist() {
    let mut checker = Checker { is_known: known_keys(), options: HashMap::new(), checked: 0 };
    let mut faults = vec![];
    for page in Page::all().into_iter().chain([Page::of_gpu_scripts()]) {
        let blocks = page.blocks();
        let scripts =
            blocks.iter().filter(|block| block.language == "sh").map(|block| block.code.clone());
        let starts = ["cargo ", "deepburn ", "finetune ", "benches/gpu/"];
        let inline = page
            .inline_code()
            .into_iter()
            .filter(|code| starts.iter().any(|it| code.starts_with(it)));
        for words in scripts.chain(inline).flat_map(|script| shell::commands(&script)) {
            if let Err(fault) = checker.command(&words) {
                faults.push(format!("{}: {}: {fault}", page.path, words.join(" ")));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(checker.checked > 40, "only {} commands", checker.checked);
}

struct Checker<K> {
    is_known: K,
    /// Options by program and subcommand.
    options: HashMap<String, Vec<String>>,
    checked: usize,
}

impl<K: Fn(&str) -> bool> Checker<K> {
    fn command(&mut self, words: &[String]) -> Result<(), String> {
        let is_variable = |word: &&String| {
            word.split_once('=').is_some_and(|(name, _)| name.chars().all(is_upper))
        };
        let words = &words[words.iter().take_while(is_variable).count()..];
        let Some((program, arguments)) = words.split_first() else {
            return Err("no command".into());
        };
        self.checked += 1;
        match program.strip_prefix("target/release/").unwrap_or(program) {
            "cargo" => self.cargo(arguments),
            program @ ("finetune" | "deepburn") => self.program(program, arguments),
            script @ ("benches/gpu/build" | "benches/gpu/run") => check_script(script, arguments),
            other if OTHERS.contains(&other) => Ok(()),
            other => Err(format!("unknown program {other}")),
        }
    }

    fn cargo(&mut self, arguments: &[String]) -> Result<(), String> {
        let end = arguments.iter().position(|word| word == "--").unwrap_or(arguments.len());
        let (own, inner) = (&arguments[..end], arguments.get(end + 1..).unwrap_or_default());
        let mut target = None;
        let mut words = own.iter().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} has no value"));
            match word.as_str() {
                flag if CARGO_FLAGS.contains(&flag) => {}
                "--bin" => target = Some(value()?.clone()),
                "-p" => {
                    let package = value()?;
                    manifest(package).ok_or(format!("no package {package}"))?;
                    target = Some(package.clone());
                }
                "--features" => value()?.split(',').try_for_each(check_feature)?,
                "--test" | "--bench" | "--example" => check_target(word, value()?)?,
                other => return Err(format!("unknown option {other}")),
            }
        }
        match target.as_deref() {
            Some(program @ ("finetune" | "deepburn")) => self.program(program, inner),
            Some("deepburn-benches") => check_benches(inner),
            _ => Ok(()),
        }
    }

    fn program(&mut self, program: &str, arguments: &[String]) -> Result<(), String> {
        let (subcommand, arguments) = match (program, arguments.split_first()) {
            ("deepburn", Some((subcommand, rest))) => (Some(subcommand.as_str()), rest),
            _ => (None, arguments),
        };
        let known = self.options(program, subcommand)?.clone();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            if word == "--" {
                return self.command(words.cloned().collect::<Vec<_>>().as_slice());
            }
            if word.starts_with("--") && !known.contains(word) {
                return Err(format!("unknown option {word}"));
            }
            match (word.as_str(), words.as_slice().first()) {
                ("--set", Some(value)) => {
                    let key = value.split_once('=').ok_or("--set without a value")?.0;
                    (self.is_known)(key).then_some(()).ok_or(format!("unknown key {key}"))?;
                }
                ("--config", Some(file)) if !root().join("configs").join(file).exists() => {
                    return Err(format!("no job file {file}"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The options in the help of a program or subcommand.
    fn options(&mut self, program: &str, subcommand: Option<&str>) -> Result<&Vec<String>, String> {
        let name = format!("{program} {}", subcommand.unwrap_or_default());
        if !self.options.contains_key(&name) {
            let path = match program {
                "finetune" => env!("CARGO_BIN_EXE_finetune"),
                _ => env!("CARGO_BIN_EXE_deepburn"),
            };
            let arguments: Vec<_> = subcommand.into_iter().chain(["--help"]).collect();
            let help = run(path, &arguments)?;
            let words = help.split(|c: char| c.is_whitespace() || ",]=".contains(c));
            let options = words.filter(|word| word.starts_with("--")).map(str::to_owned).collect();
            self.options.insert(name.clone(), options);
        }
        Ok(&self.options[&name])
    }
}

fn is_upper(c: char) -> bool {
    c.is_ascii_uppercase() || c == '_'
}

fn members() -> Vec<PathBuf> {
    let crates = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    crates.chain(["benches", "models", "datasets"].map(|member| root().join(member))).collect()
}

/// The manifest of a package of the workspace.
fn manifest(package: &str) -> Option<String> {
    let texts = members()
        .into_iter()
        .filter_map(|member| fs::read_to_string(member.join("Cargo.toml")).ok());
    let name = format!("name = \"{package}\"\n");
    texts.into_iter().find(|text| text.contains(&name))
}

fn check_feature(feature: &str) -> Result<(), String> {
    let (package, name) = feature.split_once('/').unwrap_or(("deepburn-cli", feature));
    let text = manifest(package).ok_or(format!("no package {package}"))?;
    text.contains(&format!("\n{name} = [")).then_some(()).ok_or(format!("no feature {feature}"))
}

fn check_target(option: &str, name: &str) -> Result<(), String> {
    let folder = match option {
        "--test" => "tests",
        "--bench" => "benches",
        _ => "examples",
    };
    let exists = |member: &Path| {
        let path = member.join(folder);
        path.join(format!("{name}.rs")).exists() || path.join(name).join("main.rs").exists()
    };
    members().iter().any(|member| exists(member)).then_some(()).ok_or(format!("no {option} {name}"))
}

/// Checks options of a script, which its head lists, and names of steps.
fn check_script(path: &str, arguments: &[String]) -> Result<(), String> {
    let text = fs::read_to_string(root().join(path)).unwrap();
    let head: String = text.lines().take_while(|line| line.starts_with('#')).collect();
    let words: Vec<_> = head.split(|c: char| c.is_whitespace() || ",;#".contains(c)).collect();
    let mut all = arguments.iter().flat_map(|word| word.split(','));
    all.find(|word| !words.contains(word)).map_or(Ok(()), |word| Err(format!("unknown {word}")))
}

fn check_benches(arguments: &[String]) -> Result<(), String> {
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let is_bench = root().join(format!("benches/src/tables/{word}.rs")).exists();
        match word.as_str() {
            "--peers" | "--rounds" | "--without" => drop(words.next()),
            "--quick" | "all" | "report" => {}
            _ if is_bench => {}
            _ => return Err(format!("no bench {word}")),
        }
    }
    Ok(())
}
