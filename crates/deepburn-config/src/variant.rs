//! Choosing among named variants: the optimizer, the schedule.

use crate::check::{find_variant, nearest};
use crate::key::Status;

use crate::kind::Variant;
use crate::resolve::Context;
use crate::section::Section;

/// The variant that the section's `type` names. Reports an unknown name with the nearest known
/// one, and a known one that does not exist in this version; a missing `type` has been reported.
pub(crate) fn choose(
    section: &Section<'_>,
    variants: &'static [Variant],
    noun: &str,
    context: &mut Context<'_>,
) -> Option<&'static Variant> {
    let name = section.text("type")?;
    let Some(variant) = find_variant(variants, name) else {
        let available =
            variants.iter().filter(|variant| matches!(variant.status, Status::Honoured));
        let remedy = match nearest(variants.iter().map(|variant| variant.name), name) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => {
                format!("use one of {}", available.map(|v| v.name).collect::<Vec<_>>().join(", "))
            }
        };
        context.findings.push(section.error(
            "type",
            format!("\"{name}\" is no known {noun}"),
            remedy,
        ));
        return None;
    };
    let Status::Unavailable { feature, remedy, .. } = variant.status else { return Some(variant) };
    let message = format!("\"{name}\" asks for {feature}, which is not available in this version");
    context.findings.push(section.error("type", message, remedy));
    None
}
