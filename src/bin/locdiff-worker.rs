//! x
fn main() {
    println!("{:?}", locdiff::native::versions());
}
