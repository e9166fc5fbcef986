//! Tables of the texts that the model generated after evaluations: what it says to each prompt, and
//! how that changed.

use crate::GeneratedText;
use crate::html;

/// The number of evaluations in a table: the first one and the last ones.
const MOST_EVALUATIONS: usize = 6;

/// Appends a table for each prompt, in the order of the last evaluation.
pub(super) fn push(html: &mut String, texts: &[GeneratedText]) {
    let Some(last) = texts.last().map(|text| text.step) else { return };
    let mut steps: Vec<u64> = texts.iter().map(|text| text.step).collect();
    // The texts are in the order of their steps.
    steps.dedup();
    if steps.len() > MOST_EVALUATIONS {
        // The first evaluation stays, so that the table shows what training has changed.
        steps.drain(1..=steps.len() - MOST_EVALUATIONS);
    }
    let of = |step: u64| texts.iter().filter(move |text| text.step == step);
    for (number, GeneratedText { prompt, expected, .. }) in of(last).enumerate() {
        let mut rows = vec![("Prompt".to_owned(), prompt.clone())];
        rows.extend(expected.iter().map(|text| ("Data".to_owned(), text.clone())));
        // Every evaluation has the same prompts in the same order.
        let row = |step: &u64| Some((format!("Step {step}"), of(*step).nth(number)?.text.clone()));
        rows.extend(steps.iter().filter_map(row));
        html::table(html, &format!("Generated text {}", number + 1), &rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prompt_has_its_texts_by_step() {
        let text = |step, prompt: &str, expected: Option<&str>| GeneratedText {
            step,
            prompt: prompt.to_owned(),
            text: format!("<{step}> to {prompt}"),
            expected: expected.map(str::to_owned),
        };
        let texts: Vec<_> =
            (1..=9).flat_map(|step| [text(step, "a", None), text(step, "b", Some("c"))]).collect();
        let mut html = String::new();
        push(&mut html, &texts);
        assert_eq!(html.matches("Generated text").count(), 2);
        assert_eq!(html.matches(">Data</th><td>c<").count(), 1);
        for step in [1, 5, 6, 7, 8, 9] {
            let part = format!("<th scope=\"row\">Step {step}</th><td>&lt;{step}&gt; to b</td>");
            assert!(html.contains(&part), "{part}: {html}");
        }
        assert!(!html.contains("Step 2<") && !html.contains("Step 4<"), "{html}");
        let mut none = String::new();
        push(&mut none, &[]);
        assert_eq!(none, "");
    }
}
