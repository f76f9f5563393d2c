#[path = "build/control.rs"]
mod control;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    control::generate_control_service()
}
