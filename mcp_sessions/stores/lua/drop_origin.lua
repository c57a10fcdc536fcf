-- needs: session log
-- ARGV: stream, origin, new log epoch
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local log = open_log(ARGV[1], ARGV[3], seconds(ends))
if log then
    for _, entry in ipairs(redis.call('XRANGE', log.events, '-', '+')) do
        if members_of(entry).o == ARGV[2] then
            forget(log, entry)
        end
    end
    save(log)
end
if ARGV[1] == 'get' then
    redis.call('HDEL', base .. ':c', ARGV[2])
end
return false
