//! `ferroced`: the service of a network namespace.

fn main() {
    let options = ferroce_service::server::ServerOptions::default();
    if let Err(error) = ferroce_service::server::Service::bind(options).and_then(|service| service.run()) {
        eprintln!("ferroced: {error}");
        std::process::exit(1);
    }
}
