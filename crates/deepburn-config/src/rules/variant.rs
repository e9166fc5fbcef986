//! Choosing among named variants: the optimizer, the schedule.

use super::*;
use crate::check::nearest;

/// The variant that `name`, the section's `type`, names. Reports an unknown name with the nearest
/// known one, and a known one that does not exist in this version; a missing `type` has been
/// reported.
pub(super) fn choose(
    name: &Setting<'_, Option<&str>>,
    variants: &'static [Variant],
    noun: &str,
    context: &mut Context<'_>,
) -> Option<&'static Variant> {
    let given = name.value?;
    let Some(variant) = Variant::find(variants, given) else {
        let available = variants.iter().filter(|v| matches!(v.status, Status::Honoured));
        let available: Vec<_> = available.map(|variant| variant.name).collect();
        let remedy = match nearest(variants.iter().map(|variant| variant.name), given) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => format!("use one of {}", available.join(", ")),
        };
        refuse!(context, name => "unknown {noun} \"{given}\""; "{remedy}");
        return None;
    };
    let Status::Unavailable { feature, remedy, .. } = variant.status else { return Some(variant) };
    refuse!(context, name => "\"{given}\" asks for {feature}, which is not available in this version"; "{remedy}");
    None
}
