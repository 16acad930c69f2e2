"""A command over a training configuration, whose keys users of other trainers take for options."""

import click


class ConfigCommand(click.Command):
    """A command that says of an unknown option which key it is, and how `--set` sets it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does; raises UsageError with the key in place of options that look like the unknown one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from ..core.config import key_named
            from ..train.config.train_config import TrainConfig

            key = key_named(TrainConfig, error.option_name.lstrip("-").replace("-", "_"))
            if not key:
                raise
            raise click.UsageError(
                f"No such option {error.option_name!r}. It is a key of the configuration: --set {key}=VALUE.", ctx
            ) from error
