"""Shell: `raftq node`, one node as this process."""

from typing import Annotated

import typer

from raftq.client.common.errors import InvalidArgument

# Settings with an option of their own; all others go through --set.
OPTIONS = (
    "node_id", "data_dir", "cluster_id", "secret_file", "advertised_host", "native", "http", "raft",
    "voters", "seeds", "rack", "log_level", "log_format",
)  # fmt: skip

Text = str | None


def node(  # noqa: PLR0913 - what can be said about a node
    config: Annotated[Text, typer.Option(metavar="FILE", help="The settings, as TOML.")] = None,
    node_id: Annotated[
        Text, typer.Option(metavar="N", help="The id of the node, unique in the cluster.")
    ] = None,
    data_dir: Annotated[
        Text, typer.Option(metavar="DIR", help="The directory for all data.")
    ] = None,
    cluster_id: Annotated[Text, typer.Option(metavar="NAME", help="The same on all nodes.")] = None,
    secret_file: Annotated[Text, typer.Option(metavar="FILE", help="The shared secret.")] = None,
    advertised_host: Annotated[
        Text, typer.Option(metavar="HOST", help="The host name for other nodes and clients.")
    ] = None,
    native: Annotated[
        Text, typer.Option(metavar="HOST:PORT", help="The address for clients.")
    ] = None,
    http: Annotated[
        Text, typer.Option(metavar="HOST:PORT", help="The address for REST; none switches it off.")
    ] = None,
    raft: Annotated[Text, typer.Option(metavar="HOST:PORT", help="The address for Raft.")] = None,
    voters: Annotated[
        Text, typer.Option(metavar="N=HOST:PORT,...", help="The voters of Raft.")
    ] = None,
    seeds: Annotated[
        Text, typer.Option(metavar="HOST:PORT,...", help="Native addresses of other nodes.")
    ] = None,
    rack: Annotated[Text, typer.Option(help="Nodes of one rack may fail together.")] = None,
    log_level: Annotated[Text, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[Text, typer.Option(help="text or json.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting.")
    ] = None,
    ready_file: Annotated[
        Text, typer.Option(metavar="FILE", help="Written when the node serves.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check the settings.")] = False,
) -> None:
    """Run one node until Ctrl-C or SIGTERM.

    Settings come from the file, then from RAFTQ_... variables, then from these options; the last
    one wins."""
    given = locals()
    from raftq.node.config_source import load_config  # noqa: PLC0415 - only what a command needs
    from raftq.node.launch import launch  # noqa: PLC0415

    arguments: dict[str, str] = {name: given[name] for name in OPTIONS if given[name] is not None}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"--set {setting}: not NAME=VALUE")
        arguments[name] = value
    loaded = load_config(config, arguments=arguments)
    if check:
        typer.echo(f"node {loaded.node_id}: the settings are sound")
        return
    launch(loaded, ready_file)
