-- needs: session log
-- ARGV: now, log epoch, its place in the lists, then the fields of a new session
--
-- The session, and the place in the lists that nobody has then: that of this one if another lives
-- with the same id, or that of one whose time is over. And whether the session is new (0 or 1).
local now, epoch, member = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local known = redis.call('HMGET', base, 'expires', 'member')
-- Those who come in the same second have the same place.
local is_other = known[2] ~= member
if known[1] and not has_come(known[1], now) then
    return { { record(), is_other and member }, 0 }
end
if known[1] then
    delete()
end
redis.call('HSET', base, 'member', member, unpack(ARGV, 4))
local expires, ends, mode = unpack(redis.call('HMGET', base, 'expires', 'ends', 'mode'))
if mode ~= 'conversation' and mode ~= 'task' and mode ~= 'keys' then
    save(new_log('events', epoch))
end
move_deadline(now, expires, ends)
return { { record(), is_other and known[2] }, 1 }
