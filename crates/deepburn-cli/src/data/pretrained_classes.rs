//! The classes of a pretrained classifier, which its head has been trained for.
//!
//! Main type: [`PretrainedClasses`]. A job may name the classes, but it changes neither their
//! number nor their order.

use std::path::Path;

use deepburn_config::{Job, counted};
use deepburn_models::gpt2::PretrainedGpt2;
use deepburn_models::hf::{ClassNames, ProblemType};
use serde_json::{Map, Value};

use crate::data::problem_type::{ChosenProblemType, config_in, names_classes, names_key};
use crate::failure::Failure;

/// The number of classes in `transformers` if a `config.json` does not say it.
const DEFAULT_COUNT: usize = 2;

/// The classes of a pretrained classifier.
pub(crate) struct PretrainedClasses<'a> {
    /// Their number, or the number of values to predict.
    pub(crate) count: usize,
    /// Their names; `None` if they have numbers only.
    names: Option<ClassNames>,
    /// The folder of the model.
    folder: &'a Path,
}

impl<'a> PretrainedClasses<'a> {
    /// Reads the classes of the model in `folder`; `None` if it is a language model, which gets a
    /// new head.
    ///
    /// # Errors
    /// Returns a user's mistake if the configuration cannot be read.
    pub(crate) fn read(folder: &'a Path) -> Result<Option<Self>, Failure> {
        let config = PretrainedGpt2::read_config(folder).map_err(Failure::mistake)?;
        if !config.extra.is_sequence_classifier() {
            return Ok(None);
        }
        let names = config.class_names().map_err(Failure::of_key("model.config"))?;
        let count = config.extra.num_labels().unwrap_or(DEFAULT_COUNT);
        Ok(Some(Self { count, names, folder }))
    }

    /// Checks that the model has the classes of the job and its data, and returns their number.
    /// `needed` is the number that they need. `names` are their names; they are known if they are
    /// not from the labels.
    ///
    /// # Errors
    /// Returns a user's mistake if the number or the order of classes differs, or if nothing says
    /// which class of the model a name in the data is.
    pub(crate) fn check(
        &self,
        job: &Job,
        (names, are_known): (Option<&ClassNames>, bool),
        needed: usize,
        problem: &ChosenProblemType,
    ) -> Result<usize, Failure> {
        self.check_count(job, needed, are_known && names_classes(job), problem)?;
        // Labels without names are the class numbers of the model.
        if let Some(names) = names {
            if !are_known && self.names.is_none() {
                return Err(unnamed(names));
            }
            self.check_order(names, job)?;
        }
        Ok(self.count)
    }

    /// Checks that names keep the order of the names that the model has.
    ///
    /// # Errors
    /// Returns a user's mistake if a class gets the name of another one, whose outputs it would not
    /// have.
    fn check_order(&self, names: &ClassNames, job: &Job) -> Result<(), Failure> {
        // Without names of its own, the model takes any.
        let own = self.names.as_ref().map_or(&[][..], ClassNames::as_slice);
        let moved = names.as_slice().iter().enumerate().find_map(|(class, name)| {
            let before = own.iter().position(|it| it == name)?;
            (before != class).then_some((class, name, before))
        });
        let Some((class, name, before)) = moved else { return Ok(()) };
        Err(Failure::mistake(format!(
            "{}: names class {class} \"{name}\", which is class {before} of model.pretrained ({}); keep the order of the \
             model, give new names, or remove it",
            names_key(job),
            config_in(self.folder)
        )))
    }

    /// Checks the number of classes, of which the job names all if `is_named`.
    ///
    /// # Errors
    /// Returns a user's mistake if the number differs.
    fn check_count(
        &self,
        job: &Job,
        needed: usize,
        is_named: bool,
        problem: &ChosenProblemType,
    ) -> Result<(), Failure> {
        // A classifier may have classes that the data lacks, but a regression predicts every
        // number.
        let (count, is_regression) = (self.count, problem.kind == ProblemType::Regression);
        let fits = if is_regression { needed == count } else { needed <= count };
        let given = job.model.config.get("num_labels").and_then(Value::as_u64);
        let (fault, remedy) = match given {
            _ if !fits && is_regression => {
                let numbers = counted(needed, "number");
                (format!("data.label_field: a label has {numbers}"), "use labels that it predicts")
            }
            _ if !fits && is_named => {
                let names = counted(needed, "name");
                (format!("{}: has {names}", names_key(job)), "name its classes")
            }
            _ if !fits => {
                let classes = counted(needed, "class");
                (
                    format!("data.label_field: the labels have {classes}"),
                    "use data with its classes",
                )
            }
            Some(given) if given != count as u64 => {
                (format!("model.config.num_labels: is {given}"), "remove it")
            }
            _ => return Ok(()),
        };
        Err(Failure::mistake(format!(
            "{fault}, but the classifier of model.pretrained has {} ({}); {remedy}, or start from a language model, which \
             gets a new head",
            counted(count, "output"),
            config_in(self.folder)
        )))
    }
}

/// Returns the error of named labels for a model whose classes have numbers only. It proposes the
/// names in alphabetical order.
fn unnamed(names: &ClassNames) -> Failure {
    let numbered = |(number, name)| (format!("{number}"), Value::from(name));
    let names = names.as_slice().iter().map(String::as_str);
    let proposed: Map<String, Value> = names.enumerate().map(numbered).collect();
    Failure::mistake(format!(
        "model.config.id2label: missing: the classes of model.pretrained have numbers only and the labels have names, so \
         nothing says which is which; write \"id2label\": {} if that is their order",
        Value::Object(proposed)
    ))
}
