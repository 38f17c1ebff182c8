//! Starts a server by name, says where it is, and holds it until its input ends.
use std::io::Read;
fn main() -> anyhow::Result<()> {
    let b = laneway_servers::rabbitmq::start()?;
    println!("{} pid {:?} {}", laneway_servers::rabbitmq::url(&b), b.node.id(), b.node.folder().display());
    std::io::stdin().read_to_end(&mut vec![])?;
    Ok(())
}
