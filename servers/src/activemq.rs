//! ActiveMQ (the classic one): a broker that speaks STOMP, in about three seconds.
//!
//! Debian's package has no start script for one broker in a folder, so Java is started on its jars directly.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::process::{Recipe, Server, free_port};

/// What Debian calls it.
pub const PACKAGE: &str = "activemq";

/// The jar that starts a broker; it finds the others beside it.
pub const JAR: &str = "/usr/share/activemq/bin/activemq.jar";

/// The user and the password of every broker.
pub const USER: (&str, &str) = ("laneway", "rosebud");

/// Starts a broker that only [`USER`] may use.
pub fn start() -> Result<Server> {
    if !Path::new(JAR).exists() {
        bail!("{JAR} is not there: `cargo xtask setup` installs the package {PACKAGE}");
    }
    let port = free_port()?;
    let recipe =
        Recipe { name: "activemq", port, command: Box::new(broker), ready: Box::new(|_| true), user: None };
    Server::start(recipe, |folder| prepare(folder, port))
}

/// How to connect to it.
pub fn url(server: &Server) -> String {
    format!("stomp://{}:{}@{}", USER.0, USER.1, server.address())
}

fn prepare(folder: &Path, port: u16) -> Result<()> {
    fs::create_dir_all(folder.join("conf"))?;
    let (user, password) = USER;
    let text = format!(
        r#"<beans xmlns="http://www.springframework.org/schema/beans" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
  xsi:schemaLocation="http://www.springframework.org/schema/beans http://www.springframework.org/schema/beans/spring-beans-2.0.xsd
  http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="laneway" useJmx="false" dataDirectory="{data}">
    <destinationPolicy><policyMap><policyEntries>
      <policyEntry queue=">" messageGroupMapFactoryType="bucket"/>
    </policyEntries></policyMap></destinationPolicy>
    <persistenceAdapter><kahaDB directory="{data}/kahadb"/></persistenceAdapter>
    <plugins>
      <simpleAuthenticationPlugin anonymousAccessAllowed="false">
        <users><authenticationUser username="{user}" password="{password}" groups="users"/></users>
      </simpleAuthenticationPlugin>
    </plugins>
    <systemUsage><systemUsage>
      <memoryUsage><memoryUsage limit="64 mb"/></memoryUsage>
      <storeUsage><storeUsage limit="512 mb"/></storeUsage>
      <tempUsage><tempUsage limit="64 mb"/></tempUsage>
    </systemUsage></systemUsage>
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{port}?transport.hbGracePeriodMultiplier=1.5"/>
    </transportConnectors>
  </broker>
</beans>
"#,
        data = folder.join("data").display()
    );
    fs::write(folder.join("conf/activemq.xml"), text)?;
    Ok(())
}

fn broker(folder: &Path) -> Command {
    let mut command = Command::new("java");
    command.args([
        "-Xmx256m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Dactivemq.home=/usr/share/activemq",
    ]);
    for (name, path) in [("base", ""), ("conf", "conf"), ("data", "data")] {
        command.arg(format!("-Dactivemq.{name}={}", folder.join(path).display()));
    }
    command.args(["-jar", JAR, "start"]);
    command.arg(format!("xbean:file:{}", folder.join("conf/activemq.xml").display()));
    command.current_dir(folder);
    command
}
