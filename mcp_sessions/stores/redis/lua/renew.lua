-- needs: session log
-- ARGV: new log epoch
if redis.call('HGET', base, 'mode') == 'protocol' then
    local log = new_log('events', ARGV[1])
    redis.call('UNLINK', log.events, log.by_key)
    save(log)
end
return false
